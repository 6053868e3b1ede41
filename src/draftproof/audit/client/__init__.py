"""HTTP client of OpenAI-compatible endpoints: requests, answers, discovery."""
