"""Results of evaluations: scores with their intervals, and tables of models"""
