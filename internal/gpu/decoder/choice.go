package decoder

import "gorgonia.org/leanattention/internal/gpu"

// linearLaunch is how a Linear is launched: as a skinny GEMM, as a GEMM, or, without either, as GEMVs.
type linearLaunch struct {
	skinny *skinnyLaunch
	gemm   *gemmLaunch
}

// choose says how a Linear is launched. Of 16-bit weights, on compute capability 9.0:
//
//	rows        launch                          parts of an element of x, and with RoundX
//	1 and 2     GEMV                            2, 2
//	3 to 16     skinny GEMM                     2, 2: products take no time beside the weights
//	17 to 128   skinny GEMM; a tiled GEMM       2, 1
//	            where its rings have too little
//	            room, and of more than 32 rows
//	            where that costs less
//	129 to ...  tiled GEMM or persistent GEMM,  2, 1
//	            whichever costs less
//
// Later GPUs have GEMVs of up to 8 rows, and tiled GEMMs, with as many parts; all others have GEMVs. RoundX
// changes which kernels there are and what they cost: it never forbids a launch.
func (d *Engine) choose(o *Linear) (l linearLaunch, err error) {
	skinny, ok, err := d.configureSkinny(o)
	if err != nil {
		return l, err
	}
	tiled := !ok || o.Rows > mostTogether
	if element := o.Parts[0].W.DType; tiled && o.Rows > fewRows && gpu.Known(element) && d.gemm[element] != nil {
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

// Up to mostTogether rows are a skinny GEMM if they can be: it takes no more than its weights.
const mostTogether = 32

// parts are those that each element of x is multiplied in.
func (l *linearLaunch) parts() int {
	switch {
	case l.skinny != nil:
		return skinnyKinds[l.skinny.kind].parts
	case l.gemm != nil:
		return l.gemm.parts
	}
	return 2
}
