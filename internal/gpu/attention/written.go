package attention

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/variant"
)

// Attention with a user's variant (kernels/attn_written.cuh). Its kernel is printed and compiled at run time, for each structure of
// the expressions: numbers and tensors are parameters of the kernel.

// writtenFeatures are the features of kernels with a variant, beyond those of decode kernels.
const writtenFeatures = scoredFeatures&^(attn.Trees|attn.SinkTokens) | attn.Varied

// writtenNumbers is the most numbers that follow from a variant's parameters.
const writtenNumbers = 192

// writtenAxes is the most axes of a tensor.
const writtenAxes = 4

// Tensor is a variant's tensor: floats of the type of queries, or ints of 32 bits, in row-major order.
type Tensor struct {
	Memory gpu.Memory
	Shape  []int
}

// writtenParams is struct WrittenParams.
type writtenParams struct {
	tensors              [variant.MaxTensors]uint64
	lists, starts, tiles uint64
	sizes                [variant.MaxTensors * writtenAxes]int32
	numbers              [writtenNumbers]uint32
}

// writtenLaunch is struct WrittenLaunchParams.
type writtenLaunch struct {
	keyMap, valueMap cuda.TensorMap
	Params
	score      scoreParams
	written    writtenParams
	meet       meetParams
	prefetched uint64 // 0: the kernel does not read prefetched entries
	_          [(mapAlign - (unsafe.Sizeof(Params{})+unsafe.Sizeof(scoreParams{})+unsafe.Sizeof(writtenParams{})+unsafe.Sizeof(meetParams{})+8)%mapAlign) % mapAlign]byte
}

// restoreParams is struct RestoreParams.
type restoreParams struct {
	from, logs, out, seqs                uint64 // addresses
	outRow, outHead, lseRow, lseHead     int64
	sequences, rows, heads, dim, outType int32
	_                                    [4]byte
}

// restores reports whether weights are not divided by their sum: a second launch multiplies outputs in float32.
func restores(g *attn.Problem) bool { return g.Variant != nil && g.Variant.Unnormalised }

// restoreBytes returns the offset of the log-sum-exps behind outputs of rows in float32, and the end.
func restoreBytes(g *attn.Problem, rows int) (lse, end int64) {
	const align = 16
	lse = (int64(g.Out.Extent(rows, g.Heads, g.ValueDim))*4 + align - 1) / align * align
	return lse, lse + int64(g.LSE.Extent(rows, g.Heads, 1))*4
}

// written is the part of a plan for variants.
type written struct {
	lists  list[int32] // of each of seqs the number of its first block of rows in starts; -1: all its LeanTiles are scheduled
	starts list[int32] // of each block of rows where its list of LeanTiles begins in tiles, and the end
	tiles  list[int32]

	empty  []int32            // rows whose block has no LeanTiles
	bounds []variant.Interval // scratch of see
	launch writtenLaunch
}

func (w *written) sections() []entries { return []entries{&w.lists, &w.starts, &w.tiles} }

// hides reports whether LeanTiles may be left out.
func (w *written) hides(g *attn.Problem) bool {
	return g.Variant != nil && (g.Variant.Visible >= 0 || g.Window > 0)
}

// size sets the lengths of the lists.
func (w *written) size(g *attn.Problem, need *measured, least *Capacity) {
	for _, l := range w.sections() {
		l.of().want(0, 0, 0)
	}
	if !w.hides(g) {
		return
	}
	const most = 1 << 22 // entries that are reserved in advance
	blocks := attn.Ceil(attn.Product(least.queries(), g.Group()), BlockRows)
	w.lists.want(need.Sequences, least.Sequences, 0)
	w.starts.want(int(need.blocks), min(attn.Product(blocks, least.Sequences), most), 1)
	w.tiles.want(int(need.tiles)/g.KVHeads, min(attn.Product(blocks, attn.Ceil(attn.Product(least.Pages, g.PageTokens), tileTokens(g))+least.Sequences), most), 0)
}

// see lists the LeanTiles of a block of packed rows [first, end) of a sequence, `number` of the caller's, in which some row may see some
// key. It returns how many there are.
func (w *written) see(g *attn.Problem, s *sequence, number, first, end int) int64 {
	group, tile := g.Group(), tileTokens(g)
	if len(w.bounds) < len(g.Variant.Nodes) {
		w.bounds = make([]variant.Interval, len(g.Variant.Nodes))
	}
	from, to := first/group, (end-1)/group // query positions
	begin, stop := g.Mask.Range(int(s.queries), int(s.keys), from, to+1)
	before := int(s.keys - s.queries)
	limits := variant.Bounds{
		Query: variant.Between(before+from, before+to), Head: variant.Between(0, g.Heads-1), Sequence: variant.Between(number, number),
	}
	w.starts.data = append(w.starts.data, int32(len(w.tiles.data)))
	n := int64(0)
	for i := max(begin, 0) / tile; i*tile < stop; i++ {
		limits.Key = variant.Between(i*tile, min((i+1)*tile, stop)-1)
		if g.Variant.Sees(&limits, w.bounds) == variant.Never {
			continue
		}
		w.tiles.data = append(w.tiles.data, int32(i))
		n++
	}
	if n == 0 {
		for i := from; i <= to; i++ {
			if row := s.row + int32(i); len(w.empty) == 0 || w.empty[len(w.empty)-1] != row {
				w.empty = append(w.empty, row)
			}
		}
	}
	return n
}

// seeAll makes the LeanTiles of a sequence's blocks, from number `first` of starts on, those that it has without a list, if no list leaves one
// out.
func (w *written) seeAll(first int, full bool) {
	if full {
		w.tiles.data, w.starts.data = w.tiles.data[:w.starts.data[first]], w.starts.data[:first]
		first = -1
	}
	w.lists.data = append(w.lists.data, int32(first))
}

// printed are the kernels of variants of an engine.
type printed struct {
	sync.Mutex
	kernels map[string]*kernel // by their sources
	known   map[printedKey]printedKernel
}

// printedKey identifies a kernel and its numbers: equal keys have equal kernels.
type printedKey struct {
	*variant.Program
	line             *kernel
	dim              int
	query            attn.DType
	changes, windows bool
}

type printedKernel struct {
	*kernel
	numbers []uint32 // that follow from Params
}

// Names of types in kernels.
var (
	stores  = map[attn.DType]string{attn.Float32: "Float32", attn.Float16: "Float16", attn.BFloat16: "BFloat16"}
	formats = map[attn.DType]string{attn.Float32: "AsF32", attn.Float16: "AsF16", attn.BFloat16: "AsBF16"}
)

// print returns k, a line of the table for variants, for the variant of g, and the numbers of its parameters. The kernel is compiled if no
// problem of the same structure came before.
func (e *Engine) print(op string, g *attn.Problem, k *kernel) (printedKernel, error) {
	key := printedKey{g.Variant, k, g.Dim, g.QueryType, g.Cap != 0 || g.Slopes != "" || g.Bias != (attn.Bias{}), g.Window > 0}
	e.printed.Lock()
	defer e.printed.Unlock()
	if made, ok := e.printed.known[key]; ok {
		return made, nil
	}
	loads := make([]string, len(g.Variant.Tensors))
	for i, d := range g.Variant.Tensors {
		if loads[i] = stores[g.QueryType] + "::load"; d.Int {
			loads[i] = "elementOf<int>"
		}
	}
	text := g.Variant.CUDA(loads, fmt.Sprintf("changes = %t, windows = %t", key.changes, key.windows))
	if len(text.Numbers) > writtenNumbers {
		return printedKernel{}, gpu.Errorf(op, attn.ErrUnsupported, "a variant with %d numbers that follow from Params: %d are the most on a GPU", len(text.Numbers), writtenNumbers)
	}
	if e.dev == nil { // for a schedule alone
		return printedKernel{k, text.Numbers}, nil
	}
	sum := sha256.Sum256([]byte(text.Text))
	name := fmt.Sprintf("written_%s_%d_%s", gpu.Name(k.kv), g.Dim, hex.EncodeToString(sum[:8]))
	source := fmt.Sprintf("#include \"attn_written.cuh\"\n%sWRITTEN_ATTENTION(%s, %s, %d)\n", text.Text, name, formats[k.kv], g.Dim)
	restore := name + "_restore"
	if restores(g) {
		source += "WRITTEN_RESTORE(" + restore + ")\n"
	}
	made := e.printed.kernels[source]
	if made == nil {
		m, err := gpu.Compiled(e.dev, source)
		if err != nil {
			return printedKernel{}, gpu.Errorf(op, attn.ErrUnsupported, "a variant's kernel: %v", err)
		}
		f, err := gpu.WithShared(m, &e.info, name)
		if err != nil {
			return printedKernel{}, err
		}
		copied := *k
		made = &copied
		made.line, made.entries, made.functions = k, []string{name}, []*cuda.Function{f}
		if restores(g) {
			if f, err = m.Function(restore); err != nil {
				return printedKernel{}, err
			}
			made.functions = append(made.functions, f)
		}
	}
	const most = 256 // programs that are known, which a map keeps in memory
	if e.printed.kernels == nil {
		e.printed.kernels = map[string]*kernel{}
	}
	if e.printed.known == nil || len(e.printed.known) >= most {
		e.printed.known = map[printedKey]printedKernel{}
	}
	e.printed.kernels[source], e.printed.known[key] = made, printedKernel{made, text.Numbers}
	return e.printed.known[key], nil
}

// runWritten queues attention with a variant.
func (p *Plan) runWritten(s *cuda.Stream, o *Operands, k *kernel) error {
	g, a, l := &p.form.geometry, &p.params, &p.written.launch
	made, err := p.engine.print("run", g, k.line)
	if err != nil {
		return err
	}
	own := *o
	if restores(g) {
		lse, end := restoreBytes(g, p.reach)
		own.Out = gpu.Memory{Buffer: p.memory.states, DType: attn.Float32, Len: int(lse / 4)}
		own.LSE = gpu.Memory{Buffer: p.memory.states, Offset: lse, DType: attn.Float32, Len: int(end-lse) / 4}
	}
	grid, err := p.arguments(&own)
	if err != nil {
		return err
	}
	*l = writtenLaunch{keyMap: a.keyMap, valueMap: a.valueMap, Params: a.Params, meet: a.meet, score: p.scoresOf(g, o, k)}
	w := &l.written
	copy(w.numbers[:], made.numbers)
	if p.written.hides(g) {
		w.lists, w.starts, w.tiles = p.written.lists.address(&p.memory), p.written.starts.address(&p.memory), p.written.tiles.address(&p.memory)
	}
	for i := range g.Variant.Tensors {
		t := &o.Tensors[i]
		w.tensors[i] = t.Memory.Address()
		for axis, size := range t.Shape {
			w.sizes[i*writtenAxes+axis] = int32(size)
		}
	}
	p.args.Reset()
	cuda.Struct(&p.args, l)
	p.hold(o)
	if err := k.functions[0].Launch(s, grid, &p.args); err != nil || !restores(g) {
		return err
	}
	r := &restoreParams{
		from: own.Out.Address(), logs: own.LSE.Address(), out: o.Out.Address(), seqs: p.seqs.address(&p.memory),
		outRow: int64(g.Out.Row), outHead: int64(g.Out.Head), lseRow: int64(g.LSE.Row), lseHead: int64(g.LSE.Head),
		sequences: int32(len(p.seqs.data)), rows: int32(p.form.rows), heads: int32(g.Heads), dim: int32(g.ValueDim), outType: gpu.Code(o.Out.DType),
	}
	p.args.Reset()
	cuda.Struct(&p.args, r)
	p.hold(o)
	return k.functions[1].Launch(s, cuda.Grid{Blocks: [3]int{p.engine.blocks}, Threads: [3]int{restoreThreads}}, &p.args)
}

const restoreThreads = 256

// checkTensors returns an error if o's tensors are not those of the problem's variant, or if an index of one may be out of range for a query
// and a key of the plan. Elements of tensors may be any numbers.
func (p *Plan) checkTensors(op string, o *Operands) error {
	g := &p.form.geometry
	if g.Variant == nil {
		return nil
	}
	if restores(g) && o.LSE.Buffer != nil {
		return gpu.Errorf(op, attn.ErrUnsupported, "a log-sum-exp of a variant that is Unnormalised: its weights have no sum")
	}
	first, last, keys, seqs := math.MaxInt, 0, 1, 1
	for i := range p.seqs.data {
		s := &p.seqs.data[i]
		first, last, keys = min(first, int(s.keys-s.queries)), max(last, int(s.keys)-1), max(keys, int(s.keys))
		seqs = max(seqs, int(p.details.data[i].number)+1)
	}
	var shapes [][]int
	for i, d := range g.Variant.Tensors {
		t := &o.Tensors[i]
		if want := g.QueryType; !d.Int && t.Memory.DType != want {
			return gpu.Errorf(op, attn.ErrDType, "%s is %v; it must be %v as the queries", d.Name, t.Memory.DType, want)
		}
		size := 1
		for _, n := range t.Shape {
			size = attn.Product(size, n)
		}
		if size > math.MaxInt32 {
			return gpu.Errorf(op, attn.ErrShape, "%s has shape %v: %d elements are the most on a GPU", d.Name, t.Shape, math.MaxInt32)
		}
		if err := t.Memory.CheckLoose(op, d.Name, size); err != nil {
			return err
		}
		shapes = append(shapes, t.Shape)
	}
	bounds := variant.Bounds{
		Query: variant.Between(min(first, last), last), Key: variant.Between(0, keys-1), Head: variant.Between(0, g.Heads-1), Sequence: variant.Between(0, seqs-1),
	}
	if err := g.Variant.CheckIndices(shapes, &bounds); err != nil {
		return gpu.Errorf(op, attn.ErrShape, "%v", err)
	}
	return nil
}

// countTiles returns the numbers of LeanTiles of the blocks of a sequence, `number` of the caller's, with a variant that hides keys.
func (p *Plan) countTiles(g *attn.Problem, s *sequence, number, block int) {
	w, rows, tile := &p.written, int(s.queries)*g.Group(), tileTokens(g)
	at, full := len(w.starts.data), true
	for first := 0; first < rows; first += block {
		end := min(first+block, rows)
		n := w.see(g, s, number, first, end)
		p.tiles = append(p.tiles, n)
		_, to := g.Mask.Keys(int(s.queries), int(s.keys), (end-1)/g.Group())
		full = full && n == int64(max(to, 0)+tile-1)>>bits.TrailingZeros(uint(tile))
	}
	w.seeAll(at, full)
}

// reset begins the lists of a step.
func (w *written) reset() {
	w.lists.data, w.starts.data, w.tiles.data, w.empty = w.lists.data[:0], w.starts.data[:0], w.tiles.data[:0], w.empty[:0]
}

// finishLists ends the list of blocks, and adds rows without LeanTiles to the masked ones.
func (p *Plan) finishLists(g *attn.Problem) {
	w := &p.written
	if !w.hides(g) {
		return
	}
	w.starts.data = append(w.starts.data, int32(len(w.tiles.data)))
	known := p.masked.data[1:]
	slices.Sort(known)
	for _, row := range w.empty {
		if _, there := slices.BinarySearch(known, row); !there {
			p.masked.data = append(p.masked.data, row)
		}
	}
	p.masked.data[0] = int32(len(p.masked.data) - 1)
}
