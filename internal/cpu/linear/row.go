package linear

import (
	"slices"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// A layer of one row is a read of its weights: memory should never be idle. So a thread goes through consecutive
// weights, and prefetches the beginning of the next piece at the end of each. Other threads take the pieces that a
// slow thread has not begun.

// rowRun is one row of the layers of a linearRun. As a task for the pool its workers are ranges of pieces, as many as
// threads.
type rowRun struct {
	*linearRun
	outs   int // output features of a piece, of each layer
	pieces int
	before []int // pieces of the layers before each layer, unless layers are in turn
	ranges []rowRange
	args   []rowScratch
	then   []memory // the likely first reads of each thread in the next call; empty: unknown
}

// rowRange is the pieces of a thread that have not begun: the first, and the end, in 32 bits each. The thread takes
// the first piece, others the last.
type rowRange struct {
	left atomic.Uint64
	_    [2*cpu.CacheLine - 8]byte // processors fetch lines in pairs
}

// rowScratch is the scratch of a thread.
type rowScratch struct {
	rowArgs
	blocks blockScratch
	_      [cpu.CacheLine]byte
}

// take returns a piece that has not begun, and the piece after it, -1 if that belongs to another thread.
func (r *rowRange) take(own bool) (piece, next int, ok bool) {
	for {
		left := r.left.Load()
		first, end := left>>32, left&(1<<32-1)
		switch {
		case first >= end:
			return 0, 0, false
		case !own:
			if r.left.CompareAndSwap(left, left-1) {
				return int(end - 1), -1, true
			}
		case r.left.CompareAndSwap(left, left+1<<32):
			if first+1 == end {
				return int(first), -1, true
			}
			return int(first), int(first + 1), true
		}
	}
}

// oneRow computes the row l.first of all layers.
func (l *linearRun) oneRow(e *cpu.Engine, threads int) error {
	r, k := &l.row, &l.kernels.row
	r.linearRun = l
	all := 0
	for i := range l.layers {
		if i == 0 || !l.inTurn {
			all += l.layers[i].out
		}
	}
	// All streams have at least one row, and a thread has several pieces, of which others may take some.
	r.outs = k.streams * max(1, min(k.unit/max(l.wRow, 1), all/(threads*cpu.SharesPerThread))/k.streams)
	r.pieces, r.before = 0, r.before[:0]
	for i := range l.layers {
		r.before = append(r.before, r.pieces)
		if i == 0 || !l.inTurn {
			r.pieces += r.piecesOf(&l.layers[i])
		}
	}
	if r.pieces == 0 {
		return nil
	}
	threads = min(threads, r.pieces)
	for len(r.args) < threads { // len(r.ranges) also falls
		r.args = append(r.args, rowScratch{})
	}
	r.ranges = slices.Grow(r.ranges[:0], threads)[:threads]
	for i := range r.ranges {
		r.ranges[i].left.Store(uint64(i*r.pieces/threads)<<32 | uint64((i+1)*r.pieces/threads))
	}
	r.then = r.then[:0]
	if k.fetch != nil {
		cpu.Own[kept](e).successors.turn(r)
	}
	if err := e.RunOn(r, threads, threads); err != nil {
		return err
	}
	r.linearRun = nil
	for i := range threads {
		r.args[i].rowArgs = rowArgs{}
		r.args[i].blocks.forget()
	}
	return nil
}

// beginning returns the first read of thread i: the contiguous beginning of its range, up to the prefetch limit.
func (r *rowRun) beginning(i int) memory {
	first, end := i*r.pieces/len(r.ranges), (i+1)*r.pieces/len(r.ranges)
	for j := range r.layers {
		l := &r.layers[j]
		if from, to := r.part(first, j); from < to {
			outs := min((end-first)*r.outs, l.out-from)
			return memory{uintptr(unsafe.Add(l.w, from*r.wRow)), min(outs*r.wRow, r.kernels.row.idle)}
		}
	}
	return memory{}
}

// Prefetch returns the thread's likely next read.
func (r *rowRun) Prefetch(thread int) cpu.Prefetch {
	if len(r.then) != len(r.ranges) {
		return cpu.Prefetch{}
	}
	return cpu.Prefetch{At: r.then[thread].at, Bytes: r.then[thread].bytes, Fetch: r.kernels.row.fetch}
}

func (r *rowRun) piecesOf(l *linearLayer) int { return (l.out-1)/r.outs + 1 }

// Work computes the remaining pieces of range i, and then of the other ranges.
func (r *rowRun) Work(i, thread int) {
	for j := range r.ranges {
		of := &r.ranges[(i+j)%len(r.ranges)]
		for {
			piece, next, ok := of.take(j == 0)
			if !ok {
				break
			}
			r.compute(&r.args[thread], piece, next)
		}
	}
}

// part returns the output features of layer j in a piece; none if to <= from.
func (r *rowRun) part(piece, j int) (from, to int) {
	if !r.inTurn {
		piece -= r.before[j]
	}
	if piece < 0 {
		return 0, 0
	}
	return piece * r.outs, min((piece+1)*r.outs, r.layers[j].out)
}

// layersOf returns the layers of which a piece has a part, [from, to): all layers in turn, or one.
func (r *rowRun) layersOf(piece int) (from, to int) {
	if r.inTurn {
		return 0, len(r.layers)
	}
	to, _ = slices.BinarySearch(r.before, piece+1)
	return to - 1, to
}

// begins returns the address of the weights of a piece's first part, from layer least on; nil if there is none.
func (r *rowRun) begins(piece, least int) unsafe.Pointer {
	first, end := r.layersOf(piece)
	for j := max(first, least); j < end; j++ {
		if from, to := r.part(piece, j); from < to {
			return unsafe.Add(r.layers[j].w, from*r.wRow)
		}
	}
	return nil
}

// compute computes a piece. next is the thread's next piece, or -1.
func (r *rowRun) compute(a *rowScratch, piece, next int) {
	first, end := r.layersOf(piece)
	for j := first; j < end; j++ {
		from, to := r.part(piece, j)
		if from >= to {
			continue
		}
		then := r.begins(piece, j+1)
		if then == nil && next >= 0 {
			then = r.begins(next, 0)
		}
		if r.blocks.kernels != nil {
			r.blockFeatures(&a.blocks, &r.layers[j], from, to)
		} else {
			r.features(&a.rowArgs, &r.layers[j], from, to, then)
		}
		r.finish(&r.layers[j], r.first, 1, from, to-from)
	}
}

// features computes the sums of features [from, to) of a layer. then is the thread's next address, or nil.
func (r *rowRun) features(a *rowArgs, l *linearLayer, from, to int, then unsafe.Pointer) {
	k := &r.kernels.row
	a.n, a.x = r.in, unsafe.Add(l.x, r.first*l.xRow)
	lines := r.wRow / cpu.CacheLine
	a.beyond = min(k.ahead/cpu.CacheLine, lines)
	a.within = lines - a.beyond
	// After the last row compute prefetches then, or otherwise the lines that were just read.
	compute := func(at, rows, step, row int, then unsafe.Pointer) {
		a.w, a.wStep, a.wSkip = unsafe.Add(l.w, at*r.wRow), step*r.wRow, (row-1)*r.wRow
		a.y, a.yStep, a.yRow = unsafe.Add(l.y, r.first*l.yRow+at*r.size), step*r.size, row*r.size
		a.rows, a.next, a.behind = rows, row*r.wRow-lines*cpu.CacheLine, -a.beyond*cpu.CacheLine
		if then != nil {
			last := uintptr(a.w) + uintptr((rows-1)*row*r.wRow+lines*cpu.CacheLine)
			a.behind = int(uintptr(then) - last)
		}
		k.dot[r.format](a)
	}
	rows := (to - from) / k.streams
	left := from + rows*k.streams
	if rows > 0 {
		step, row := rows, 1
		if r.wRow >= k.side {
			step, row = 1, k.streams
		}
		compute(from, rows, step, row, then)
	}
	if left < to { // all streams take the same row
		compute(left, to-left, 0, 1, then)
	}
}
