"""Models for people to use: clients and servers of OpenAI's API beside and after a run"""
