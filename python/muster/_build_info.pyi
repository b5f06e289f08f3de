version: str
built_with_torch: str
