"""Engines that run a reasoning model: sampling traces and forking answers off them."""
