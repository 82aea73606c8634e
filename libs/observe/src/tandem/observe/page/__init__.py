"""The page of a run: a web server that reads run folders"""
