"""What every room speaks: errors, views, settings, events and step reports. No sockets, no torch.distributed."""
