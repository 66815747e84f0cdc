"""`saguaro serve`: the engine behind OpenAI's HTTP interface."""
