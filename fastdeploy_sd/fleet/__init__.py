"""What instances and routers say to each other, and the instance's side of it. Knows no engine and no OpenAI API."""
