"""Tool calls in generated text: formats of the models, incremental parsers. Free of torch and HTTP."""
