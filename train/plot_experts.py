def draw_domains(loads, path): return path
