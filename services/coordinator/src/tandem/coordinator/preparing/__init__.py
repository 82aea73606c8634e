"""Before a run: check what it needs, fetch models, make what it begins from"""
