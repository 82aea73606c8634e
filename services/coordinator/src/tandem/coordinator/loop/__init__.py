"""The loop around the scheduler: messages in, actions carried out, a step after a step"""
