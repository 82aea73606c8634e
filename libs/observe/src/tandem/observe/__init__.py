"""What can be read off a run: its folder, the page, reports, diagnoses, samples, exported metrics"""
