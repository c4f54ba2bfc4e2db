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
//	17 to 128   skinny GEMM, and a tiled GEMM   2, 1
//	            where its rings have too little
//	            room: more than 64 rows of
//	            16384 columns, in two parts of 8192
//	129 to ...  tiled GEMM or persistent GEMM,  2, 1
//	            whichever costs less
//
// Later GPUs have GEMVs of up to 8 rows, and tiled GEMMs, with as many parts; all others have GEMVs. RoundX
// changes which kernels there are and what they cost: it never forbids a launch.
func (d *Engine) choose(o *Linear) (l linearLaunch, err error) {
	if skinny, ok, err := d.configureSkinny(o); ok || err != nil {
		l.skinny = &skinny
		return l, err
	}
	if element := o.Parts[0].W.DType; o.Rows > fewRows && gpu.Known(element) && d.gemm[element] != nil {
		gemm, err := d.configureGEMM(o)
		l.gemm = &gemm
		return l, err
	}
	return l, nil
}

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
