module gorgonia.org/leanattention/kernels/build

go 1.26.0

require (
	github.com/ebitengine/purego v0.10.0
	gorgonia.org/leanattention v0.0.0
)

replace gorgonia.org/leanattention => ../..
