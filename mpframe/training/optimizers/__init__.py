"""What goes beyond one optimizer over one loss, written over the core's public parts."""
