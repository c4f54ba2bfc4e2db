package linear

import (
	"sync/atomic"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/weight"
)

const (
	// blockBytes is the largest size of the rows of x of a block, if these are between blockRowsMin and blockRowsMax
	// rows: they stay in the second-level cache while the weights stream through.
	blockBytes   = 384 << 10
	blockRowsMin = 16
	blockRowsMax = 128

	// tileOuts is the number of output features that are finished at a time. A quarter of them is a stream: long
	// enough for memory to run at full speed, and short enough for the sums to stay in the first-level cache until
	// the bias is added.
	tileOuts = 256

	// passSteps is the number of elements of In between passes over the same weights: few enough for the weights to
	// stay in the first-level cache until the next pass.
	passSteps = 6 * dotPiece

	// fetchAhead is the prefetch distance of a stream in bytes: four streams then cover the memory's latency without
	// filling the first-level cache.
	fetchAhead = 2560

	// shareOuts divides shares of output features: the shares of two workers meet at the end of a cache line.
	shareOuts = cpu.CacheLine / 4

	// shareWeights is the least number of weights of a share for rows of a single pass: some microseconds of work.
	// There are up to SharesPerThread shares a thread.
	shareWeights = 1 << 15
)

// linearLayer is the operands of one of several layers.
type linearLayer struct {
	x                     unsafe.Pointer
	xRow, yRow            int // bytes between two rows
	out                   int
	w, y                  unsafe.Pointer
	scales                unsafe.Pointer // float32, of sums or, of E4M3, of weights; nil: none
	bias, times, residual unsafe.Pointer // nil: none
	activation            attn.Activation
	rounded               int // which of the rounded x is the layer's: see blocks.go
}

// units returns the number of shareOuts features of the layer.
func (l *linearLayer) units() int { return (l.out-1)/shareOuts + 1 }

// linearRun is one call of Run, or of RunAll. As a task for the pool it is one block of rows: a worker's work is a
// share of the output features of all layers.
type linearRun struct {
	kernels *linearKernels
	in      int
	size    int // bytes of an element of x, y, bias, times and residual
	format  weight.Format
	wRow    int  // bytes of a row of w
	group   int  // columns with one scale; 0: all
	roundX  bool // x may be rounded to the weights' type
	anyRows bool // many rows are computed as few

	layers []linearLayer
	inTurn bool // two layers of equal width, of which the second needs the first's results: a share has the same features of both

	first, rows int // the block

	// Few rows.
	passes  int // passes of the block's rows over each weight
	shares  int
	workers []linearWorker

	// One row: see row.go.
	row rowRun

	// Weights of at most 8 bits: see blocks.go.
	blocks blockRun

	// Weights whose columns have an order: see order.go.
	ordered orderRun

	// Many rows, in tiles: see tiles.go.
	tiles         *matmul.Set
	way           *matmul.Way
	rowCuts       int
	groups        []tileGroup
	next          atomic.Int64 // the next piece, or the next part of x to split
	split         cpu.Aligned  // the parts of x
	strips, steps int          // of x: strips of rows, steps of elements
	across        int          // parts of a strip
	scratch       []tileScratch
}

// linearWorker is the scratch of a thread.
type linearWorker struct {
	args    dotArgs
	partial [blockRowsMax/3 + 1][partialBytes]byte // by pass; a tier takes at least 3 rows at once
	blocks  blockScratch
	_       [cpu.CacheLine]byte
}

// run computes the layers for the given number of rows.
func (l *linearRun) run(e *cpu.Engine, rows int) error {
	l.setBlocks()
	if l.tiles, l.way = l.tilesFor(rows); l.tiles != nil {
		return l.eachInTiles(e, rows)
	}
	block := min(max(blockBytes/max(l.in*l.size, 1), blockRowsMin), blockRowsMax)
	if l.blocks.strips = l.inStrips(rows); l.blocks.strips {
		blocks := (rows-1)/stripBlock + 1
		block = ((rows-1)/blocks/stripRows + 1) * stripRows
	}
	units, outs := l.units(), 0
	for i := range l.layers {
		outs += l.layers[i].out
	}
	for l.first = 0; l.first < rows; l.first += l.rows {
		l.rows = min(block, rows-l.first)
		l.passes = (l.rows-1)/l.kernels.rows + 1
		worth := attn.Product(outs, l.in*l.passes) / shareWeights
		weights := float64(outs) * float64(l.in)
		threads := cpu.ThreadsFor(cpu.WorkOf(weights*float64(l.wRow)/float64(max(l.in, 1)), weights*float64(l.rows)))
		if l.blocks.integer {
			if err := l.roundRows(e, threads); err != nil {
				return err
			}
		}
		if l.rows == 1 && (l.kernels.row.dot[l.format] != nil || l.blocks.kernels != nil && l.kernels.row.streams > 0) {
			if err := l.oneRow(e, threads); err != nil {
				return err
			}
			continue
		}
		l.shares = max(min(worth, units, threads*cpu.SharesPerThread), 1)
		if l.blocks.strips { // a share has several panels
			l.shares = max(min(l.shares, units/stripPanels), 1)
		}
		for len(l.workers) < threads {
			l.workers = append(l.workers, linearWorker{})
		}
		if err := e.RunOn(l, l.shares, threads); err != nil {
			return err
		}
	}
	return nil
}

// units returns the number of units of shares: of all layers together or, in turn, of each.
func (l *linearRun) units() (n int) {
	for i := range l.layers {
		n += l.layers[i].units()
		if l.inTurn {
			break
		}
	}
	return n
}

// Work is share i of the output features, for the rows of the block.
func (l *linearRun) Work(i, thread int) {
	units := l.units()
	from, to := i*units/l.shares, (i+1)*units/l.shares
	for j := range l.layers {
		layer := &l.layers[j]
		n := layer.units()
		if from < n && to > 0 {
			l.features(&l.workers[thread], layer, max(from, 0)*shareOuts, min(to*shareOuts, layer.out))
		}
		if !l.inTurn {
			from, to = from-n, to-n
		}
	}
}

// features computes the output features [from, to) of a layer.
func (l *linearRun) features(w *linearWorker, layer *linearLayer, from, to int) {
	w.args.xRow, w.args.yRow = layer.xRow, layer.yRow
	for at := from; at < to; at += tileOuts {
		outs := min(tileOuts, to-at)
		if l.blocks.kernels != nil {
			l.blockFeatures(&w.blocks, layer, at, at+outs)
			l.finish(layer, l.first, l.rows, at, outs)
			continue
		}
		quarter := outs / dotStreams
		w.args.wStep, w.args.yStep = quarter*l.wRow, quarter*l.size
		for o := at; o < at+quarter; o++ {
			l.dot(w, layer, o)
		}
		// The remaining features take all streams from one row of weights.
		w.args.wStep, w.args.yStep = 0, 0
		for o := at + dotStreams*quarter; o < at+outs; o++ {
			l.dot(w, layer, o)
		}
		l.finish(layer, l.first, l.rows, at, outs)
	}
}

// dot computes the sums of output feature o, and of those of the other streams, for all rows.
func (l *linearRun) dot(w *linearWorker, layer *linearLayer, o int) {
	a, size := &w.args, l.format.Bytes()
	steps := l.in
	if l.passes > 1 {
		steps = min(steps, passSteps)
	}
	a.more = 0
	for k := 0; ; k += steps {
		a.n, a.unfinished = l.in-k, 0
		if a.n > steps {
			a.n, a.unfinished = steps, 1
		}
		a.w = unsafe.Add(layer.w, o*l.wRow+k*size)
		for pass, row := 0, 0; pass < l.passes; pass++ {
			end := (pass + 1) * l.rows / l.passes
			a.rows = end - row
			a.x = unsafe.Add(layer.x, (l.first+row)*a.xRow+k*l.size)
			a.y = unsafe.Add(layer.y, (l.first+row)*a.yRow+o*l.size)
			a.partial = unsafe.Pointer(&w.partial[pass])
			// Each pass prefetches a part of the next weights, so that memory is busy while passes read the cache.
			a.ahead, a.aheadStep = fetchAhead+a.n*size*pass/l.passes, cpu.CacheLine/l.passes
			l.kernels.dot[l.format][a.rows](a)
			row = end
		}
		if a.unfinished == 0 {
			return
		}
		a.more = 1
	}
}

// finish turns the sums of some rows and output features of a layer into outputs.
func (l *linearRun) finish(layer *linearLayer, first, rows, at, outs int) {
	for row := first; row < first+rows; row++ {
		offset := (row*layer.out + at) * l.size // in dense operands
		y := unsafe.Add(layer.y, row*layer.yRow+at*l.size)
		if layer.scales != nil && l.format != weight.E4M3 {
			l.multiply(y, unsafe.Add(layer.scales, at*l.size), outs)
		}
		if layer.bias != nil {
			l.add(y, unsafe.Add(layer.bias, at*l.size), outs)
		}
		l.activate(layer.activation, y, outs)
		if layer.times != nil {
			l.multiply(y, unsafe.Add(layer.times, offset), outs)
		}
		if layer.residual != nil {
			l.add(y, unsafe.Add(layer.residual, offset), outs)
		}
	}
}

func (l *linearRun) add(dst, src unsafe.Pointer, n int) {
	if l.size == 4 {
		vector.Add(unsafe.Slice((*float32)(dst), n), unsafe.Slice((*float32)(src), n))
	} else {
		vector.Add(unsafe.Slice((*float64)(dst), n), unsafe.Slice((*float64)(src), n))
	}
}

func (l *linearRun) multiply(dst, src unsafe.Pointer, n int) {
	if l.size == 4 {
		multiplyBy(unsafe.Slice((*float32)(dst), n), unsafe.Slice((*float32)(src), n))
	} else {
		multiplyBy(unsafe.Slice((*float64)(dst), n), unsafe.Slice((*float64)(src), n))
	}
}

func multiplyBy[F lean.Float](dst, src []F) {
	for i, v := range src[:len(dst)] {
		dst[i] *= v
	}
}

func (l *linearRun) activate(f attn.Activation, dst unsafe.Pointer, n int) {
	if l.size == 4 {
		vector.Activate(f, unsafe.Slice((*float32)(dst), n))
	} else {
		vector.Activate(f, unsafe.Slice((*float64)(dst), n))
	}
}
