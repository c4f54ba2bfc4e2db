package matmul

import "unsafe"

// Args are the arguments of a kernel that computes a tile of a linear layer's output: some rows by some
// features, over a part of In. Steps and rows are distances in bytes.
type Args struct {
	Y    unsafe.Pointer // float32, row r at Y + r*YRow; every row has room for all features of a tile
	YRow int
	X    unsafe.Pointer
	XRow int
	W    unsafe.Pointer // packed weights
	N    int            // elements of In, or steps of StepDepth, at least 1
	More int            // the sums are added to y if it is not 0, else written to it

	// With parts: tiles beside each other, 32 features each, and how far apart their packed weights begin; and tiles
	// below each other, and how far apart their rows of x and of y begin. There is at least one.
	Tiles, WStep       int
	Tall, XStep, YStep int

	// Of a call one kernel is made for:
	Rows, outs     int // of the tile
	xParts, wParts int // numbers of bfloat16 that an element is the sum of
}

// PackArgs are the arguments of a kernel that puts rows of x or of weights into the order in which a tile needs
// them. Steps and rows are distances in bytes.
type PackArgs struct {
	Dst     unsafe.Pointer
	DstStep int
	DstPart int // from a part to the next
	Src     unsafe.Pointer
	SrcRow  int
	Rows    int // at least 1
	N       int // elements of a row, at least 1

	Odd int // becomes other than 0 where a kernel that looks for it sees what is not finite
}

// A step is some rows of a part of x or of weights, and some elements of each: a tile register.
const (
	StepRows  = 16
	StepDepth = 32 // 64 bytes
	StepBytes = 2 * StepRows * StepDepth
)

const packRows = 8 // of weights that a kernel packs at once as float32
