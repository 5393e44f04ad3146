"""What a Program computes with: networks, distributions, preprocessing."""
