"""What happens to each batch."""
