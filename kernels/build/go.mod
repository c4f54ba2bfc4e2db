module gorgonia.org/leanattention/kernels/build

go 1.26.0

require gorgonia.org/leanattention v0.0.0

require (
	github.com/ebitengine/purego v0.10.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
)

replace gorgonia.org/leanattention => ../..
