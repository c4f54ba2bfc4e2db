package cpu

import "unsafe"

// tileArgs are the arguments of a kernel that computes a tile of a linear layer's output: some rows by some
// features, over a part of In. Steps and rows are distances in bytes.
type tileArgs struct {
	y    unsafe.Pointer // float32, row r at y + r*yRow; every row has room for all features of a tile
	yRow int
	x    unsafe.Pointer
	xRow int
	w    unsafe.Pointer // packed weights
	n    int            // elements of In, or steps of stepDepth, at least 1
	more int            // the sums are added to y if it is not 0, else written to it

	// With parts: tiles beside each other, 32 features each, and how far apart their packed weights begin; and tiles
	// below each other, and how far apart their rows of x and of y begin. There is at least one.
	tiles, wStep       int
	tall, xStep, yStep int

	// Of a call one kernel is made for:
	rows, outs     int // of the tile
	xParts, wParts int // numbers of bfloat16 that an element is the sum of
}

// packArgs are the arguments of a kernel that puts rows of x or of weights into the order in which a tile needs
// them. Steps and rows are distances in bytes.
type packArgs struct {
	dst     unsafe.Pointer
	dstStep int
	dstPart int // from a part to the next
	src     unsafe.Pointer
	srcRow  int
	rows    int // at least 1
	n       int // elements of a row, at least 1

	odd int // becomes other than 0 where a kernel that looks for it sees what is not finite
}

const (
	packRows  = 8  // of weights that a kernel packs at once as float32
	stepRows  = 16 // of a part of x or weights: what a tile register has
	stepDepth = 32 // elements of each, 64 bytes
	stepBytes = 2 * stepRows * stepDepth
)
