//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package enginetest

import (
	"encoding/hex"
	"fmt"
	"regexp"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// Launch is what the fake driver says of one.
type Launch struct {
	Kernel                  string
	Blocks, Threads, Shared int
	Cluster                 int
	Overlap                 bool
	Arg                     []byte
}

var launchText = regexp.MustCompile(`kernel (\w+)\ngrid (\d+) 1 1 block (\d+) 1 1 shared (\d+)\n(?:cluster (\d+) 1 1\n)?(overlap 1\n)?args ([0-9a-f]+)\n`)

// Launches are those in a log of the fake driver.
func Launches(log string) (all []Launch) {
	for _, m := range launchText.FindAllStringSubmatch(log, -1) {
		l := Launch{Kernel: m[1], Overlap: m[6] != ""}
		fmt.Sscan(m[2], &l.Blocks)
		fmt.Sscan(m[3], &l.Threads)
		fmt.Sscan(m[4], &l.Shared)
		fmt.Sscan(m[5], &l.Cluster) // 0 where there is none
		l.Arg, _ = hex.DecodeString(m[7])
		all = append(all, l)
	}
	return all
}

// At is memory of the fake driver, which is the host's.
func At[T any](address uint64, i int) *T {
	var x T
	p := uintptr(address) + uintptr(i)*unsafe.Sizeof(x)
	return *(**T)(unsafe.Pointer(&p))
}

// TypeOf is the type that kernels have a number for.
func TypeOf(code int32) attn.DType {
	d := attn.DType(code)
	if !gpu.Known(d) {
		panic(fmt.Sprintf("kernels know no type %d", code))
	}
	return d
}
