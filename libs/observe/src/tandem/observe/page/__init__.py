"""The page of a run: a program that reads run folders and answers browsers"""
