package matmul

import "unsafe"

// Args are the arguments of a kernel that computes a tile of a linear layer's output: some rows by some features,
// over a part of In. Steps and rows are distances in bytes.
type Args struct {
	Y    unsafe.Pointer // float32, row r at Y + r*YRow; every row has memory for all features of a tile
	YRow int
	X    unsafe.Pointer
	XRow int
	W    unsafe.Pointer // packed weights
	N    int            // elements of In, or steps of StepDepth, at least 1
	More int            // the sums are added to y if not 0, and otherwise written

	// With parts: neighbouring tiles of 32 features each, and the distance of their packed weights; and tiles below
	// each other, and the distances of their rows of x and of y. There is at least one tile.
	Tiles, WStep       int
	Tall, XStep, YStep int

	// Constant for a kernel:
	Rows, outs     int // of the tile
	xParts, wParts int // numbers of bfloat16 whose sum is an element
}

// PackArgs are the arguments of a kernel that orders rows of x or of weights as a tile needs them. Steps and rows are
// distances in bytes.
type PackArgs struct {
	Dst     unsafe.Pointer
	DstStep int
	DstPart int // distance of parts
	Src     unsafe.Pointer
	SrcRow  int
	Rows    int // at least 1
	N       int // elements of a row, at least 1

	Odd int // set to another number than 0 by a kernel that finds an element that is not finite
}

// A step is some rows of a part of x or of weights, and some elements of each: a tile register.
const (
	StepRows  = 16
	StepDepth = 32 // 64 bytes
	StepBytes = 2 * StepRows * StepDepth
)

const packRows = 8 // rows of weights that a kernel packs at once as float32
