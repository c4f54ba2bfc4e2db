module gorgonia.org/leanattention/cmd/leanbench

go 1.26.0

require gorgonia.org/leanattention v0.0.0

replace gorgonia.org/leanattention => ../..
