package linear

import "unsafe"

// dotStreams is the number of weight rows that a dot kernel reads at once: memory delivers several streams
// faster than one.
const dotStreams = 4

// dotMaxRows is the most rows of x that any dot kernel takes.
const dotMaxRows = 4

// dotArgs are the arguments of a dot kernel: some rows of x against four rows of weights. Steps and rows
// are distances in bytes. Numbers of x and y are float32, or float64 where the weights are.
type dotArgs struct {
	y           unsafe.Pointer // the result of row r and stream s lies at y + r*YRow + s*YStep
	yStep, yRow int
	w           unsafe.Pointer // the weights of stream s begin at w + s*WStep
	wStep       int
	x           unsafe.Pointer // row r begins at x + r*XRow
	xRow        int
	rows        int // of x, at least 1; a kernel is made for one number of them
	n           int // numbers of a row

	// Rows may come in several calls. Sums begin with those in partial if more is not 0, else with 0; they
	// are left in partial if unfinished is not 0, else their results go to y.
	more, unfinished int
	partial          unsafe.Pointer // partialBytes, in a form that is the kernel's own

	// While a stream's i-th cache line is read, the one at ahead + i*aheadStep is brought nearer, counted
	// from the stream's beginning. That is a hint, which may reach over the ends of buffers.
	ahead, aheadStep int
}

// dotPiece is what every call for a row but the last has a multiple of, in terms.
const dotPiece = 128

// partialBytes is the most that a dot kernel leaves in partial: a vector for each row and stream.
const partialBytes = dotMaxRows * dotStreams * 64

// rowArgs are the arguments of a row kernel: a row of x against rows of weights, which are so many to each of several streams.
// Numbers of x and y are float32.
type rowArgs struct {
	y           unsafe.Pointer // the result of row r of stream s lies at y + r*YRow + s*YStep
	yRow, yStep int
	w           unsafe.Pointer // the first row of stream s begins at w + s*WStep
	wStep       int
	wSkip       int // bytes between a row of a stream and the next
	x           unsafe.Pointer
	n           int // numbers of a row
	rows        int // of each stream, at least 1

	// A row has within+beyond whole cache lines. While each of the first ones is read, the one so many as beyond behind it is
	// brought nearer; while the last ones are, as many from where the line behind the row's last whole one begins, and next
	// bytes on: those of the stream's next row. Of its last row these are behind bytes on. All of that is a hint, which may
	// reach over the ends of buffers.
	within, beyond int
	next, behind   int
}
