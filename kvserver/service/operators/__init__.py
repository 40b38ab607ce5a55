"""What operators command."""
