package linear

import "unsafe"

// dotStreams is the number of weight rows that a dot kernel reads at once: memory delivers several streams faster
// than one.
const dotStreams = 4

// dotMaxRows is the largest number of rows of x of a dot kernel.
const dotMaxRows = 4

// dotArgs are the arguments of a dot kernel: some rows of x against four rows of weights. Steps and rows are
// distances in bytes. Elements of x and y are float32, or float64 for weights of float64.
type dotArgs struct {
	y           unsafe.Pointer // the result of row r and stream s is at y + r*YRow + s*YStep
	yStep, yRow int
	w           unsafe.Pointer // the weights of stream s begin at w + s*WStep
	wStep       int
	x           unsafe.Pointer // row r begins at x + r*XRow
	xRow        int
	rows        int // of x, at least 1; a kernel serves one number of rows
	n           int // elements of a row

	// A row may take several calls. Sums begin with partial if more is not 0, and otherwise with 0. Sums go to
	// partial if unfinished is not 0, and otherwise results go to y.
	more, unfinished int
	partial          unsafe.Pointer // partialBytes, in the kernel's own format

	// While a stream's i-th cache line is read, the line at ahead + i*aheadStep, from the stream's beginning, is
	// prefetched. The address may be beyond the ends of buffers.
	ahead, aheadStep int
}

// The number of terms of every call for a row but the last is a multiple of dotPiece.
const dotPiece = 128

// partialBytes is the largest size of partial: a vector for each row and stream.
const partialBytes = dotMaxRows * dotStreams * 64

// rowArgs are the arguments of a row kernel: a row of x against rows of weights, the same number for each of several
// streams. Elements of x and y are float32.
type rowArgs struct {
	y           unsafe.Pointer // the result of row r of stream s is at y + r*YRow + s*YStep
	yRow, yStep int
	w           unsafe.Pointer // the first row of stream s begins at w + s*WStep
	wStep       int
	wSkip       int // bytes between two rows of a stream
	x           unsafe.Pointer
	n           int // elements of a row
	rows        int // of each stream, at least 1

	// A row has within+beyond whole cache lines. While one of the first `within` lines is read, the line `beyond`
	// lines after it is prefetched. While one of the last `beyond` lines is read, a line of the stream's next row is
	// prefetched: as many lines from the one after the row's last whole line, next bytes on. For the stream's last
	// row the distance is behind bytes. Prefetched addresses may be beyond the ends of buffers.
	within, beyond int
	next, behind   int
}

// Weights of at most 8 bits are read in groups: four blocks of 32 elements of a row. Kernels bring weights and x into the two forms
// below, with zeros behind the end of a row. The order of the integers is a tier's own.
const (
	groupBlocks   = 4
	groupElements = 32 * groupBlocks
)

// weightGroup is a group of a row of weights. Element e of block b is scales[b] q + minima[b].
//
// If runs of 16 elements have a scale, high has those of the second halves of blocks.
type weightGroup struct {
	q                    [groupElements]byte
	scales, high, minima [groupBlocks]float32
	_                    [16]byte
}

// xGroup is a group of a row of x that is rounded to 8 bits. Element e of block b is scales[b] q, and sums[b] the sum of the block.
type xGroup struct {
	q            [groupElements]int8
	scales, sums [groupBlocks]float32
	_            [32]byte

	// Of the kernels for AVX-512: scales and sums with each number four times. offsets are what sums of products begin with, since the
	// weights have 128 added: of blocks, of their first halves, of their second halves.
	wideScales, wideSums [4 * groupBlocks]float32
	offsets              [3][4 * groupBlocks]int32
}

// panelGroup is the groups of panelOuts rows of weights, in sets of four rows. The order of the integers is a tier's own. Of block b and
// row s of a set, scales[4*b + s] is the scale, and second[4*b + s] the minimum or the scale of the second half of the block.
type panelGroup [panelOuts / dotStreams]struct {
	q              [dotStreams * groupElements]byte
	scales, second [dotStreams * groupBlocks]float32
}

const panelOuts = 4 * dotStreams

// interleaveArgs are the arguments of a kernel that brings the groups of four rows of weights into one set of panelGroups, or those of
// 16 rows of x or of weights into strips.
type interleaveArgs struct {
	dst    unsafe.Pointer // the set, in the first panelGroup, or the first strip
	src    unsafe.Pointer // weightGroups, or xGroups
	srcRow int
	second int    // where a weightGroup has the numbers for second
	groups int    // of a row, at least 1
	flip   uint64 // of strips: see stripWGo
}

// stripArgs are the arguments of a kernel that multiplies strips of x by a panel of weights.
type stripArgs struct {
	y      unsafe.Pointer // float32: the results of row r are side by side at y + r*yRow
	yRow   int
	w      unsafe.Pointer // weightStrips
	x      unsafe.Pointer // xStrips of the first strip
	xStep  int            // bytes to those of the next
	rows   int            // of x, at least 1; the last strip may be a part
	groups int            // of a row, at least 1

	// As in panelArgs, with stripPartial bytes for each strip.
	more, unfinished int
	partial          unsafe.Pointer

	sums unsafe.Pointer // scratch, stripPartial bytes for each group
}

// panelArgs are the arguments of a kernel that multiplies groups of rows of x by a panel of weights.
type panelArgs struct {
	y       unsafe.Pointer // float32: the results of row r are side by side at y + r*yRow
	yRow    int
	w       unsafe.Pointer // panelGroups
	x       unsafe.Pointer
	xRow    int
	rows    int
	groups  int            // of a row
	half    int            // if not 0, there is one more group, whose last two blocks are zeros
	partial unsafe.Pointer // panelPartial bytes for each row

	// Sums begin with partial if more is not 0, and otherwise with 0. Sums go to partial if unfinished is not 0, and otherwise results go
	// to y.
	more, unfinished int

	// With each group of two rows of x, or of the last row, so many cache lines are prefetched, at least 1, from fetch on. Their addresses
	// may be beyond the ends of buffers.
	fetch uintptr
	lines int
}

const panelPartial = 4 * panelOuts * groupBlocks

// roundArgs are the arguments of a kernel that rounds a row of x to 8 bits.
type roundArgs struct {
	dst unsafe.Pointer // groups of x
	src unsafe.Pointer // float32
	n   int            // elements, a multiple of 32 and at least 32
}

// unpackArgs are the arguments of a kernel that makes groups of rows of weights. Steps are distances in bytes. A kernel that makes one
// set of panelGroups reads dotStreams rows, and prefetches nothing.
type unpackArgs struct {
	dst    unsafe.Pointer
	dstRow int
	src    unsafe.Pointer
	srcRow int
	rows   int // at least 1
	n      int // elements of a row, a multiple of the format's block

	// With each group, the cache lines at fetch are prefetched, as many as the bytes of a group, and fetch is fetchStep on for the next
	// group, of this row or of the next. These addresses may be beyond the ends of buffers.
	fetch     uintptr
	fetchStep int
}

// expandArgs are the arguments of a kernel that converts groups of rows of weights to float32, in order.
type expandArgs struct {
	dst    unsafe.Pointer
	dstRow int
	src    unsafe.Pointer
	srcRow int
	rows   int // at least 1
	groups int // of a row, at least 1
}

// groupArgs are the arguments of a kernel that multiplies groups of x by groups of weights. Steps are distances in bytes.
type groupArgs struct {
	y           unsafe.Pointer // float32: the result of row r and output feature o is at y + r*yRow + o*yStep
	yRow, yStep int
	w           unsafe.Pointer
	wRow        int // 0: the same row for all output features
	x           unsafe.Pointer
	xRow        int
	groups      int // of a row, at least 1
	sets        int // of output features, at least 1; a kernel of several rows has one
}

// blockRowArgs are the arguments of a kernel that multiplies groups of a row of x by rows of weights. Steps are distances in bytes.
type blockRowArgs struct {
	y     unsafe.Pointer // float32: the result of output feature o is at y + o*yStep
	yStep int
	w     unsafe.Pointer
	wRow  int // 0: the same row for all output features
	x     unsafe.Pointer
	n     int // elements of a row, a multiple of the format's block
	sets  int // of dotStreams output features, at least 1

	// Of E4M3: x is rows of float32, and the result of row r of x is at y + r*yRow + o*yStep. The scale of elements
	// [i*group, (i+1)*group) of output feature o is at scales + o*scaleRow + 4*i. group is a multiple of dotPiece. The kernel
	// changes sets, and yAt and scalesAt, which are 0.
	rows, xRow, yRow int
	scales           unsafe.Pointer
	scaleRow, group  int
	yAt, scalesAt    int

	// As in unpackArgs, with the bytes of four groups for each group of x.
	fetch     uintptr
	fetchStep int
}
