"""Routes that run the model without output text: /v1/embeddings and /v1/score."""
