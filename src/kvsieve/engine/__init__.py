"""From a prompt to text: requests, batches, the loop that runs them, and the text side."""
