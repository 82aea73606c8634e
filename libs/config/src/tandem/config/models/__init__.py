"""The models that a configuration names: their repositories, families, sizes and adapters"""
