"""Views of a run: its folder, the page, reports, diagnoses, samples, exported metrics"""
