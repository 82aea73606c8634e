"""Models for people to use: clients and servers of OpenAI's API, during and after a run"""
