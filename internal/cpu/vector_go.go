package cpu

import "unsafe"

// vectorKernels are the functions of one tier for the elements of queries and outputs, each with the contract
// and the bits of its twin below.
type vectorKernels struct {
	scale  func(dst, src *float32, n int, by float64)
	divide func(dst, src *float32, n int, by float32)
}

// scaleInto is dst = src * by, rounded once.
func scaleInto[F real](dst, src []F, by float64) {
	if unsafe.Sizeof(F(0)) == 4 && len(dst) > 0 {
		vectorTiers[inUse].scale((*float32)(unsafe.Pointer(&dst[0])), (*float32)(unsafe.Pointer(&src[0])), len(dst), by)
		return
	}
	scale(dst, src, by)
}

// divideInto is dst = src / by.
func divideInto[F real](dst, src []F, by F) {
	if unsafe.Sizeof(by) == 4 && len(dst) > 0 {
		vectorTiers[inUse].divide((*float32)(unsafe.Pointer(&dst[0])), (*float32)(unsafe.Pointer(&src[0])), len(dst), float32(by))
		return
	}
	divide(dst, src, by)
}

var vectorGo = vectorKernels{scale: scaleGo, divide: divideGo}

// scaleGo is
//
//	for i := range n {
//		dst[i] = float32(float64(src[i]) * by)
//	}
func scaleGo(dst, src *float32, n int, by float64) {
	scale(unsafe.Slice(dst, n), unsafe.Slice(src, n), by)
}

// divideGo is
//
//	for i := range n {
//		dst[i] = src[i] / by
//	}
func divideGo(dst, src *float32, n int, by float32) {
	divide(unsafe.Slice(dst, n), unsafe.Slice(src, n), by)
}

func scale[F real](dst, src []F, by float64) {
	dst = dst[:len(src)]
	for i, x := range src {
		dst[i] = F(float64(x) * by)
	}
}

func divide[F real](dst, src []F, by F) {
	dst = dst[:len(src)]
	for i, x := range src {
		dst[i] = x / by
	}
}
