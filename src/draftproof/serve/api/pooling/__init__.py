"""Routes that run the model without output text: /v1/embeddings, /v1/score, /v1/rerank."""
