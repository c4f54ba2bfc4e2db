//go:build gc && !noasm

package linear

// Bytes of a set of a panelGroup, and of a panelGroup.
const (
	setBytes   = dotStreams * (groupElements + 2*4*groupBlocks)
	panelBytes = panelOuts / dotStreams * setBytes
)

// The kernels have the contracts of the Go kernels of the same names in blocks_go.go, and the bits of their results. Those named
// Dot need FEAT_DotProd. Nothing is fetched ahead.

//go:noescape
func roundNEON(a *roundArgs)

//go:noescape
func expandNEON(a *expandArgs)

//go:noescape
func expandMinimaNEON(a *expandArgs)

//go:noescape
func expandHalvesNEON(a *expandArgs)

//go:noescape
func oneNEON(a *groupArgs)

//go:noescape
func oneMinimaNEON(a *groupArgs)

//go:noescape
func oneHalvesNEON(a *groupArgs)

//go:noescape
func oneDot(a *groupArgs)

//go:noescape
func oneMinimaDot(a *groupArgs)

//go:noescape
func oneHalvesDot(a *groupArgs)

//go:noescape
func unpackI8NEON(a *unpackArgs)

//go:noescape
func unpackQ80NEON(a *unpackArgs)

//go:noescape
func unpackQ40NEON(a *unpackArgs)

//go:noescape
func unpackQ41NEON(a *unpackArgs)

//go:noescape
func unpackQ50NEON(a *unpackArgs)

//go:noescape
func unpackQ51NEON(a *unpackArgs)

//go:noescape
func unpackQ4KNEON(a *unpackArgs)

//go:noescape
func unpackQ5KNEON(a *unpackArgs)

//go:noescape
func unpackQ6KNEON(a *unpackArgs)

//go:noescape
func unpackI4x32NEON(a *unpackArgs)

//go:noescape
func unpackI4x64NEON(a *unpackArgs)

//go:noescape
func unpackI4x128NEON(a *unpackArgs)

//go:noescape
func rowI8NEON(a *blockRowArgs)

//go:noescape
func rowI8Dot(a *blockRowArgs)

//go:noescape
func rowQ80NEON(a *blockRowArgs)

//go:noescape
func rowQ80Dot(a *blockRowArgs)

//go:noescape
func rowQ40NEON(a *blockRowArgs)

//go:noescape
func rowQ40Dot(a *blockRowArgs)

//go:noescape
func rowQ41NEON(a *blockRowArgs)

//go:noescape
func rowQ41Dot(a *blockRowArgs)

//go:noescape
func rowQ50NEON(a *blockRowArgs)

//go:noescape
func rowQ50Dot(a *blockRowArgs)

//go:noescape
func rowQ51NEON(a *blockRowArgs)

//go:noescape
func rowQ51Dot(a *blockRowArgs)

//go:noescape
func rowI4x32NEON(a *blockRowArgs)

//go:noescape
func rowI4x32Dot(a *blockRowArgs)

//go:noescape
func rowI4x64NEON(a *blockRowArgs)

//go:noescape
func rowI4x64Dot(a *blockRowArgs)

//go:noescape
func rowI4x128NEON(a *blockRowArgs)

//go:noescape
func rowI4x128Dot(a *blockRowArgs)

//go:noescape
func interleaveNEON(a *interleaveArgs)

//go:noescape
func panelDot(a *panelArgs)

//go:noescape
func panelMinimaDot(a *panelArgs)

//go:noescape
func panelHalvesDot(a *panelArgs)

// rowsE4M3x1NEON is rowsE4M3Go for one row, with the bits that dotF32x1NEON gives to the float32 weights. A scale times 448, the largest
// weight, is finite.
//
//go:noescape
func rowsE4M3x1NEON(a *blockRowArgs)

// rowsE4M3x2NEON is rowsE4M3x1NEON for two rows.
//
//go:noescape
func rowsE4M3x2NEON(a *blockRowArgs)

//go:noescape
func rowQ4KNEON(a *blockRowArgs)

//go:noescape
func rowQ4KDot(a *blockRowArgs)

//go:noescape
func rowQ5KNEON(a *blockRowArgs)

//go:noescape
func rowQ5KDot(a *blockRowArgs)

//go:noescape
func rowQ6KNEON(a *blockRowArgs)

//go:noescape
func rowQ6KDot(a *blockRowArgs)
