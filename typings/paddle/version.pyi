commit: str
