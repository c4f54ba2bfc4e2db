package gradient

import (
	"math"
	"slices"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/dropout"
	"gorgonia.org/leanattention/internal/lean"
)

const (
	// A block is backwardRows query rows by backwardKeys keys: their scores, weights and gradients stay in the
	// second-level cache. Keys, values and their gradients usually come from farther away, once for all rows.
	backwardRows = 128
	backwardKeys = dropout.BlockKeys

	// Chunks, and pieces of a bias, have multiples of these.
	chunkRows = 64
	chunkKeys = 128

	// minUnits is the least number of units of work, if keys and rows suffice: a KV head is cut into chunks if a
	// batch has fewer KV heads. It is a constant, so that results depend on shapes alone.
	minUnits = 8

	// keptPartials is the number of elements of chunks' partial sums that are kept for the next pass.
	keptPartials = 1 << 20
)

// backwardRun is one call of Run. As a task for the pool it is one phase: a worker takes unit after unit until none
// is left.
type backwardRun[F cpu.Real] struct {
	shape   Shape
	ops     Operands[F]
	kernels *backwardKernels[F]

	// A chunk of a KV head is some of the keys for all rows, with partial sums of DQ, or some of the rows for all
	// keys, with partial sums of DK and DV. The smaller partial sums decide.
	chunks    int // of a KV head
	byRows    bool
	chunkSize int // keys or rows of a chunk: a multiple of chunkKeys or chunkRows
	partSize  int // elements of a partial sum
	partials  []F // the partial sums of every KV head from its second chunk on

	// Pieces of the bias have biasKeys keys of biasRows query positions, in keyBlocks columns and rowBlocks rows.
	biasKeys, biasRows, keyBlocks, rowBlocks int

	tensorSums  [][][]float64 // by unit and tensor
	tensorParts int           // of the rows of a KV head

	phase   phase
	units   int
	next    atomic.Int64 // the next unit
	workers []backwardWorker[F]
}

// phase says what a unit is.
type phase uint8

const (
	phaseChunks  phase = iota // a chunk
	phaseSums                 // a KV head whose partial sums are added
	phaseBias                 // a piece of the bias
	phaseSinks                // a query head
	phaseTensors              // some rows of all KV heads, with sums of its own for the variant's tensors
)

// run computes the gradients: first of all chunks, then the sums of their parts, if any, and last of the bias and of
// sinks.
func (r *backwardRun[F]) run(e *cpu.Engine, s *Shape, o *Operands[F]) error {
	r.shape, r.ops = *s, *o
	r.kernels = backwardKernelsFor[F](s.Dim, s.ValueDim)
	heads := s.Batch * s.KVHeads
	r.cut(heads)
	n := s.Workers
	if n == 0 { // five products of the visible scores
		n = cpu.ThreadsFor(cpu.WorkOf(0, 2.5*float64(heads)*float64(s.Rows())*float64(s.Keys)*float64(s.Dim+s.ValueDim)))
	}
	units := [...]int{phaseChunks: heads * r.chunks, phaseSums: 0, phaseBias: 0, phaseSinks: len(o.DSinks), phaseTensors: 0}
	if r.chunks > 1 {
		units[phaseSums] = heads
	}
	if o.DBias != nil {
		units[phaseBias] = r.cutBias()
	}
	if o.wantsTensors() {
		units[phaseTensors] = r.cutTensors()
	}
	for len(r.workers) < min(n, slices.Max(units[:])) {
		r.workers = append(r.workers, backwardWorker[F]{})
	}
	for i := range r.workers[:min(n, slices.Max(units[:]))] {
		r.workers[i].prepare(s)
	}
	for i, of := range units {
		if of == 0 {
			continue
		}
		r.phase, r.units = phase(i), of
		r.next.Store(0)
		if err := e.Run(r, min(n, of)); err != nil {
			return err
		}
	}
	r.addTensors()
	return nil
}

// cut cuts KV heads into chunks.
func (r *backwardRun[F]) cut(heads int) {
	s := &r.shape
	n, block := s.Keys, chunkKeys
	r.partSize = s.Rows() * s.Dim
	if size := s.Keys * (s.Dim + s.ValueDim); size < r.partSize {
		r.byRows, r.partSize, n, block = true, size, s.Rows(), chunkRows
	} else {
		r.byRows = false
	}
	want := (minUnits-1)/heads + 1
	blocks := (n-1)/block + 1
	r.chunkSize = ((blocks-1)/want + 1) * block
	r.chunks = (n-1)/r.chunkSize + 1
	if need := heads * (r.chunks - 1) * r.partSize; len(r.partials) < need {
		r.partials = dense.Make[F](need)
	}
}

func (r *backwardRun[F]) Work(i, _ int) {
	for {
		unit := int(r.next.Add(1)) - 1
		if unit >= r.units {
			return
		}
		switch r.phase {
		case phaseChunks:
			r.chunk(&r.workers[i], unit)
		case phaseSums:
			r.sum(unit)
		case phaseBias:
			r.bias(&r.workers[i], unit)
		case phaseSinks:
			r.ops.DSinks[unit] = r.sink(unit)
		case phaseTensors:
			r.tensors(&r.workers[i], unit)
		}
	}
}

// part returns the partial sum of chunk c > 0 of a KV head, to be added to the first chunk's.
func (r *backwardRun[F]) part(head, c int) []F {
	return piece(r.partials, head*(r.chunks-1)+c-1, r.partSize)
}

// piece is piece i of x, of n elements each.
func piece[F cpu.Real](x []F, i, n int) []F { return x[i*n : (i+1)*n : (i+1)*n] }

// sum adds the partial sums of a KV head, in the order of the chunks.
func (r *backwardRun[F]) sum(head int) {
	s, o := &r.shape, &r.ops
	live := s.Live(head / s.KVHeads)
	for c := 1; c < r.chunks; c++ {
		p := r.part(head, c)
		if !r.byRows {
			vector.Add(piece(o.DQ, head, len(p)), p)
			continue
		}
		dk := s.Keys * s.Dim
		vector.Add(piece(o.DK, head, dk)[:live*s.Dim], p)
		if o.DOut != nil {
			vector.Add(piece(o.DV, head, s.Keys*s.ValueDim)[:live*s.ValueDim], p[dk:])
		}
	}
}

// chunk computes the products of a chunk's keys and rows: the gradients of the chunk, and partial sums of the others.
func (r *backwardRun[F]) chunk(w *backwardWorker[F], unit int) {
	s := &r.shape
	head, c := unit/r.chunks, unit%r.chunks
	live := s.Live(head / s.KVHeads)
	w.open(r, head, live)
	first, end, row, rows := 0, s.Keys, 0, s.Rows()
	from := c * r.chunkSize
	if r.byRows {
		row, rows = from, min(from+r.chunkSize, rows)
		if c > 0 {
			p := r.part(head, c)
			w.dk, w.dv = p[:s.Keys*s.Dim], p[s.Keys*s.Dim:]
		}
	} else {
		first, end = from, min(from+r.chunkSize, end)
		if c > 0 {
			w.dqs = r.part(head, c)
		}
	}
	dk := w.dk[first*s.Dim : end*s.Dim]
	clear(dk)
	if w.dout != nil {
		clear(w.dv[first*s.ValueDim : end*s.ValueDim])
	}
	if end = min(end, live); first >= end {
		clear(w.dqs[row*s.Dim : rows*s.Dim])
		return
	}
	for row < rows {
		n := blockRows(s, row, rows)
		w.pack(row, n)
		if w.extreme() {
			w.measure()
		}
		clear(w.dq)
		for key := max(first, w.low); key < min(end, w.most); key += backwardKeys {
			w.block(key, min(backwardKeys, min(end, w.most)-key))
		}
		vector.Scale(w.dqs[row*s.Dim:(row+n)*s.Dim], w.dq[:n*s.Dim], s.Scale)
		row += n
	}
	// The queries in the sums have the factor Scale*log4(e).
	vector.Scale(dk, dk, lean.Ln4)
}

// blockRows returns how many rows of a KV head, before end, form a block from the given row on: a part of the rows of
// a head, or the rows of several heads, so that the rows of a block see about the same keys.
func blockRows(s *Shape, row, end int) int {
	n := end - row
	if s.Queries < backwardRows {
		return min(n, backwardRows/s.Queries*s.Queries)
	}
	return min(n, s.Queries-row%s.Queries, backwardRows)
}

// backwardWorker is the scratch of a worker: a block, and its KV head.
type backwardWorker[F cpu.Real] struct {
	run     *backwardRun[F]
	scratch backwardScratch[F]

	// The KV head.
	seq, live              int
	head0                  int // its first query head
	q, k, v, out, lse      []F
	dout, dlse             []F               // nil: 0
	dk, dv, dqs            []F               // destination of the gradients, or of partial sums
	from, sees             [backwardRows]int // row r of the block sees keys [from[r], sees[r]); 0, 0 if its weights are all 0
	row, rows              int               // the block's first row, and the number of rows
	low, most              int               // some row sees each key of [low, most), and none sees another
	high, least            int               // all rows see [high, least)
	qRow, doRow, dq        []F               // of the block: q with Scale*log4(e), dO, and the sums of dq
	m, l, top, factor, off []F               // of its rows: weights are 4^(s-m)*factor, and dS = p*(dp-off)
	p, ds                  []F               // rows x keys with a stride: weights, and gradients of the scores
	stride                 int
	varied                 varied[F]
	sums                   [][]float64 // of the unit, in the phase of tensors
	rule                   dropout.Rule
	dropped                []uint64 // for each row, with dropout: bit c means that the weight of column c is dropped
	capSlopes              []F      // as p: the derivatives of the soft cap
	cap                    float64  // soft cap of scores with the factor log4(e)
	kTail, vTail           []F      // keys and values that do not fill a panel
	values                 []F      // the memory of all slices above
	_                      [cpu.CacheLine]byte
}

// prepare allocates the scratch.
func (w *backwardWorker[F]) prepare(s *Shape) {
	w.stride = backwardKeys + cpu.CacheLine/int(unsafe.Sizeof(F(0))) // rows at a power of 2 would share cache sets
	block := backwardRows * w.stride
	d, dv := s.Dim, s.ValueDim
	wide := cpu.Padded(panelOf(max(d, dv, backwardKeys/2)))
	capSlopes := 0
	if s.Cap != 0 {
		capSlopes = block
	}
	need := capSlopes + 2*cpu.Padded(backwardRows*d) + cpu.Padded(backwardRows*dv) + 5*cpu.Padded(backwardRows) + 2*block +
		cpu.Padded(backwardKeys*d) + cpu.Padded(backwardKeys*dv) + wide + backwardRows*(idleDim+2) + cpu.CacheLine
	if len(w.values) < need {
		w.values = dense.Make[F](need)
	}
	if s.Dropout != 0 && w.dropped == nil {
		w.dropped = make([]uint64, backwardRows)
	}
	v := w.values
	w.qRow, w.dq = cpu.Cut(&v, cpu.Padded(backwardRows*d)), cpu.Cut(&v, cpu.Padded(backwardRows*d))
	w.doRow = cpu.Cut(&v, cpu.Padded(backwardRows*dv))
	for _, x := range []*[]F{&w.m, &w.l, &w.top, &w.factor, &w.off} {
		*x = cpu.Cut(&v, cpu.Padded(backwardRows))
	}
	for _, x := range []*[]F{&w.p, &w.ds} {
		*x = cpu.Cut(&v, block)
	}
	w.capSlopes, w.cap = cpu.Cut(&v, capSlopes), s.Cap*lean.Log4E
	w.kTail, w.vTail = cpu.Cut(&v, cpu.Padded(backwardKeys*d)), cpu.Cut(&v, cpu.Padded(backwardKeys*dv))
	w.scratch.wide, w.scratch.idle, w.scratch.stats = cpu.Cut(&v, wide), cpu.Cut(&v, backwardRows*idleDim), cpu.Cut(&v, 2*backwardRows)
	clear(w.scratch.idle)
}

// open makes a KV head the worker's.
func (w *backwardWorker[F]) open(r *backwardRun[F], head, live int) {
	s, o := &r.shape, &r.ops
	w.run, w.seq, w.live, w.head0 = r, head/s.KVHeads, live, head%s.KVHeads*s.Group()
	w.q, w.lse = piece(o.Q, head, s.Rows()*s.Dim), piece(o.LSE, head, s.Rows())
	w.k, w.dk = piece(o.K, head, s.Keys*s.Dim), piece(o.DK, head, s.Keys*s.Dim)
	w.dqs = piece(o.DQ, head, s.Rows()*s.Dim)
	w.v, w.dv, w.out, w.dout, w.dlse = nil, nil, nil, nil, nil
	w.rule = dropout.Rule{}
	if o.DOut != nil {
		w.rule = dropout.Of(s.Dropout, o.Seed) // the log-sum-exp has no dropout
		w.v, w.dv = piece(o.V, head, s.Keys*s.ValueDim), piece(o.DV, head, s.Keys*s.ValueDim)
		w.out, w.dout = piece(o.Out, head, s.Rows()*s.ValueDim), piece(o.DOut, head, s.Rows()*s.ValueDim)
	}
	if o.DLSE != nil {
		w.dlse = piece(o.DLSE, head, s.Rows())
	}
	w.openVariant()
}

// pack copies n rows of the KV head, from the given row on, to the block.
func (w *backwardWorker[F]) pack(row, n int) {
	s := &w.run.shape
	w.row, w.rows, w.low, w.high, w.least, w.most = row, n, math.MaxInt, 0, math.MaxInt, 0
	clear(w.qRow) // the number of rows is rounded up
	clear(w.doRow)
	scale := s.Scale * lean.Log4E
	for i := range n {
		r := row + i
		from, sees := s.Visible(w.seq, r)
		if w.lse[r] == F(math.Inf(-1)) {
			from, sees = 0, 0
		}
		w.from[i], w.sees[i] = from, sees
		w.high, w.least, w.most = max(w.high, from), min(w.least, sees), max(w.most, sees)
		w.m[i], w.factor[i], w.off[i] = 0, 1, 0
		if sees == 0 {
			continue // such a row adds 0 to all gradients, whatever its contents
		}
		w.low = min(w.low, from)
		vector.Scale(piece(w.qRow, i, s.Dim), piece(w.q, r, s.Dim), scale)
		w.m[i] = F(float64(w.lse[r]) * lean.Log4E)
		var off float64
		if w.dout != nil {
			do := piece(w.dout, r, s.ValueDim)
			w.packGradient(w.doRow[i*s.ValueDim:], do)
			off = vector.Dot(piece(w.out, r, s.ValueDim), do)
		}
		if w.dlse != nil {
			off -= float64(w.dlse[r])
		}
		w.off[i] = F(off)
		if s.Variant != nil && s.Variant.Unnormalised {
			w.m[i], w.off[i] = 0, 0
		}
	}
}

// packGradient copies dO of a row, with the factor of kept weights.
func (w *backwardWorker[F]) packGradient(to, do []F) {
	if w.rule.None() {
		copy(to, do)
		return
	}
	vector.Scale(to[:len(do)], do, 1/w.rule.Keep())
}

// extreme reports whether the block has a log-sum-exp so large that the rounding of scores shows in it.
func (w *backwardWorker[F]) extreme() bool {
	limit := F(1 << 9)
	if unsafe.Sizeof(limit) == 8 {
		limit = 1 << 38
	}
	for _, m := range w.m[:w.rows] {
		if m > limit || m < -limit {
			return true
		}
	}
	return false
}

// measure recomputes the maxima and the sums of the rows from the scores of the weights. The scores of the forward
// pass are rounded differently, in the last bits: for scores of millions that is more than a unit, and weights that
// do not sum to 1 would spoil the gradient.
func (w *backwardWorker[F]) measure() {
	s, k := &w.run.shape, w.run.kernels
	for r := range w.m[:w.rows] {
		w.top[r] = F(math.Inf(-1))
	}
	clear(w.l)
	for key := w.low; key < w.most; key += backwardKeys {
		n := min(backwardKeys, w.most-key)
		cols, keys := up(n, k.lanes), w.k[key*s.Dim:(key+n)*s.Dim]
		if cols > n {
			keys = copyTail(w.kTail, keys, cols*s.Dim)
		}
		k.scores(&w.scratch, w.p, w.qRow, keys, w.rows, cols, s.Dim, w.stride)
		w.modify(0, w.rows, key, n)
		w.eachSeen(0, w.rows, key, n, func(r, rows, from, n int) {
			k.weigh(&w.scratch, w.p[r*w.stride+from:], w.top[r:], w.l[r:], rows, n, w.stride)
		})
	}
	for r := range w.l[:w.rows] {
		w.sink(r)
	}
	for r, l := range w.l[:w.rows] {
		if w.sees[r] > 0 {
			w.m[r], w.factor[r] = w.top[r], 1/l
		}
	}
}

// up returns n rounded up to a multiple of m.
func up(n, m int) int { return (n + m - 1) / m * m }

// block adds the products of the block's rows and n keys, from the given key on.
func (w *backwardWorker[F]) block(key, n int) {
	s, k := &w.run.shape, w.run.kernels
	d, dv := s.Dim, s.ValueDim
	row, rows := w.seeing(key, n)
	if row == rows {
		return
	}
	keys := w.gradients(row, rows, key, n)
	if s.Cap != 0 {
		w.modifyGradient(row, rows, key, n)
	}
	p, ds, count := w.p[row*w.stride:], w.ds[row*w.stride:], up(rows-row, 4)
	k.add(&w.scratch, w.dq[row*d:], ds, keys, count, up(n, 4), d, w.stride)
	k.addTransposed(&w.scratch, w.dk[key*d:(key+n)*d], ds, w.qRow[row*d:], count, n, d, w.stride)
	if w.dout != nil {
		k.addTransposed(&w.scratch, w.dv[key*dv:(key+n)*dv], p, w.doRow[row*dv:], count, n, dv, w.stride)
	}
}

// seeing returns rows [row, end) of the block that see any of n keys, from the given key on, and perhaps others
// between and before them: row is a multiple of 4.
func (w *backwardWorker[F]) seeing(key, n int) (row, end int) {
	if w.hidden(key, n) {
		return 0, 0
	}
	if w.high <= key && w.least >= key+n {
		return 0, w.rows
	}
	row = w.rows
	for r := range w.rows {
		if from, to := w.see(r, key, n); from < to {
			row, end = min(row, r), r+1
		}
	}
	return min(row, end) &^ 3, end
}

// gradients computes the weights, dropped ones as 0, of rows [row, end) of the block for n keys, from the given key
// on, and the gradients dS of their scores. It returns the keys, padded for the kernels. Weights and gradients of
// unseen keys are 0, and so are those of rows up to a multiple of 4.
func (w *backwardWorker[F]) gradients(row, end, key, n int) (keys []F) {
	s, k := &w.run.shape, w.run.kernels
	d, dv := s.Dim, s.ValueDim
	cols := up(n, k.lanes)
	if keys = w.k[key*d : (key+n)*d]; cols > n {
		keys = copyTail(w.kTail, keys, cols*d)
	}
	p, ds := w.p[row*w.stride:], w.ds[row*w.stride:]
	k.scores(&w.scratch, p, w.qRow[row*d:], keys, end-row, cols, d, w.stride)
	w.modify(row, end, key, n)
	if w.dout == nil {
		clear(ds[:(end-row)*w.stride])
	} else {
		values := w.v[key*dv : (key+n)*dv]
		if cols > n {
			values = copyTail(w.vTail, values, cols*dv)
		}
		k.scores(&w.scratch, ds, w.doRow[row*dv:], values, end-row, cols, dv, w.stride)
		w.drop(row, end, key)
		w.zeroDropped(row, end, w.ds)
	}
	w.eachSeen(row, end, key, n, func(r, rows, from, n int) {
		at := r*w.stride + from
		k.gradient(&w.scratch, w.p[at:], w.ds[at:], w.m[r:], w.factor[r:], w.off[r:], rows, n, w.stride)
	})
	w.zeroDropped(row, end, w.p)
	for r := row; r < up(end, 4); r++ {
		from, to := w.see(r, key, n)
		if from == 0 && to == cols {
			continue
		}
		for _, x := range [][]F{w.p, w.ds} {
			x = x[r*w.stride : r*w.stride+cols]
			clear(x[:from])
			clear(x[to:])
		}
	}
	if s.Variant != nil {
		w.chain(row, end, key, n)
	}
	return keys
}

// drop finds the dropped weights of rows [row, end) of the block, for a block's keys from the given key on.
func (w *backwardWorker[F]) drop(row, end, key int) {
	if w.rule.None() {
		return
	}
	s := &w.run.shape
	for r := row; r < end; r++ {
		at := dropout.RowOf(w.seq, w.head0+(w.row+r)/s.Queries, (w.row+r)%s.Queries)
		w.dropped[r] = attention.DroppedFrom(w.rule, at, key)
	}
}

// zeroDropped sets the elements of x, laid out as p, to 0 for dropped weights.
func (w *backwardWorker[F]) zeroDropped(row, end int, x []F) {
	if w.rule.None() {
		return
	}
	for r := row; r < end; r++ {
		attention.ZeroMarked(x[r*w.stride:][:backwardKeys], 0, w.dropped[r])
	}
}

// copyTail copies x to the front of a buffer, followed by zeros, n elements in total.
func copyTail[F cpu.Real](buf, x []F, n int) []F {
	clear(buf[copy(buf, x):n])
	return buf[:n]
}

// modify applies the score modifications to rows [row, end), and stores the derivatives of the soft cap.
func (w *backwardWorker[F]) modify(row, end, key, n int) {
	s := &w.run.shape
	if s.Cap == 0 && s.Slopes == "" && s.Bias == (attn.Bias{}) && s.Variant == nil {
		return
	}
	for r := row; r < end; r++ {
		from, to := w.see(r, key, n)
		if from == to {
			continue
		}
		head, pos := w.head0+(w.row+r)/s.Queries, (w.row+r)%s.Queries
		scores := w.p[r*w.stride+from : r*w.stride+to]
		if s.Cap != 0 {
			vector.Cap(scores, w.capSlopes[r*w.stride+from:r*w.stride+to], w.cap)
		}
		if s.Slopes != "" {
			vector.AddSlopes(scores, s.Slopes.Of(head)*lean.Log4E, float64(key+from-s.Position(w.seq, w.row+r)), nil)
		}
		if s.Bias != (attn.Bias{}) {
			at := s.Bias.Row(w.seq, head, pos) + key
			vector.AddBiases(scores, unsafe.SliceData(w.run.ops.Bias[at+from:at+to]), s.Bias.Factor()*lean.Log4E, nil)
		}
		if s.Variant != nil {
			w.vary(r, head, key, n, from, scores)
		}
	}
}

// modifyGradient turns gradients of the scores into gradients of the products, by the derivatives of the soft cap.
func (w *backwardWorker[F]) modifyGradient(row, end, key, n int) {
	for r := row; r < end; r++ {
		from, to := w.see(r, key, n)
		ds := w.ds[r*w.stride:][from:to]
		for i, x := range w.capSlopes[r*w.stride:][from:to] {
			ds[i] *= x
		}
	}
}

// eachSeen calls f for the keys, of n from the given key on, that rows [row, end) of the block see: n keys after the
// first `from`, for `rows` rows from r on; once for all rows if they see all.
func (w *backwardWorker[F]) eachSeen(row, end, key, n int, f func(r, rows, from, n int)) {
	if w.high <= key && w.least >= key+n {
		f(row, end-row, 0, n)
		return
	}
	for r := row; r < end; r++ {
		if from, to := w.see(r, key, n); from < to {
			f(r, 1, from, to-from)
		}
	}
}

// see returns the keys [from, to), of n from the given key on, that row r of the block sees.
func (w *backwardWorker[F]) see(r, key, n int) (from, to int) {
	if r >= w.rows {
		return 0, 0
	}
	to = min(max(w.sees[r]-key, 0), n)
	return min(max(w.from[r]-key, 0), to), to
}

// forget drops pointers into operands.
func (r *backwardRun[F]) forget() {
	r.shape, r.ops = Shape{}, Operands[F]{}
	if len(r.partials) > keptPartials {
		r.partials = nil
	}
	for i := range r.workers {
		w := &r.workers[i]
		w.run, w.scratch.quad = nil, [4]unsafe.Pointer{}
		w.q, w.k, w.v, w.out, w.lse, w.dout, w.dlse = nil, nil, nil, nil, nil, nil, nil
		w.dk, w.dv, w.dqs = nil, nil, nil
		w.varied.Forget()
		w.sums = nil
	}
}
