"""What engines that serve share: keys, who is stopped, the way to the stop, on the device."""
