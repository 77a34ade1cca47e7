"""Model files and the decoder: GGUF reading, configuration, weights, and the loop over layers."""
