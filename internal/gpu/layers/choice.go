package layers

// linearLaunch is the launch of a Linear: a skinny GEMM, a GEMM, a product of hopper.go, or, without any, GEMVs.
type linearLaunch struct {
	skinny  *skinnyLaunch
	gemm    *gemmLaunch
	product bool
}

// choose chooses the launch of a Linear. With 16-bit weights, on compute capability 9.0:
//
//	rows        launch                          parts of an element of x, and with RoundX
//	1 and 2     GEMV                            2, 2
//	3 to 16     skinny GEMM                     2, 2: products are hidden behind the weights
//	17 to 128   skinny GEMM; a tiled GEMM       2, 1
//	            where its rings are too short,
//	            and of more than 32 rows
//	            where that costs less. With
//	            RoundX, a launch makes operands
//	            of more than 32 rows first
//	129 to ...  tiled GEMM or persistent GEMM,  2, 1
//	            whichever costs less; with
//	            RoundX a product of hopper.go
//
// Newer GPUs have GEMVs of up to 8 rows, and tiled GEMMs, with as many parts. Other GPUs have GEMVs. RoundX changes
// which kernels exist and what they cost, and never forbids a launch.
func (d *Engine) choose(o *Linear) (l linearLaunch, err error) {
	if l.product, err = d.multiplies(o); err != nil || l.product {
		return l, err
	}
	skinny, ok, err := d.configureSkinny(o)
	if err != nil {
		return l, err
	}
	tiled := !ok || o.Rows > mostTogether
	if of := o.format(); tiled && o.Rows > mostGEMVRows && hasKernels(of) && d.gemm[of] != nil {
		gemm, err := d.configureGEMM(o)
		if err != nil {
			return l, err
		}
		if !ok || gemm.cost < skinnyTaken*skinny.micros(o, d.info.Multiprocessors) {
			l.gemm = &gemm
			return l, nil
		}
	}
	if ok {
		l.skinny = &skinny
	}
	return l, nil
}

// Up to mostTogether rows a Linear is a skinny GEMM if possible: the launch takes no longer than its weights.
const mostTogether = 32

// parts returns the number of parts of each element of x.
func (l *linearLaunch) parts() int {
	switch {
	case l.skinny != nil:
		return skinnyKinds[l.skinny.kind].parts
	case l.gemm != nil:
		return l.gemm.parts
	case l.product:
		return 1
	}
	return 2
}
