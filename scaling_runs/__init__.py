"""Programs that check and measure on GPUs; each runs as a file from the repository's root."""
