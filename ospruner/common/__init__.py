"""What every floor may use: durable writes, progress, optional packages."""
