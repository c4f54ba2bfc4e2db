package attention

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
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
	sums                 uint64
	chunks               int32
	_                    [4]byte
	tensors              [variant.MaxTensors]uint64
	lists, blocks, tiles uint64
	sizes                [variant.MaxTensors * writtenAxes]int32
	numbers              [writtenNumbers]uint32
}

// writtenBlock is struct WrittenBlock.
type writtenBlock struct{ begin, count, from, to int32 }

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
	few  seen // by output tiles of decode kernels
	many seen // by output tiles of prefill kernels

	empty   []int32            // rows whose output tile of decode kernels has no LeanTiles
	bounds  []variant.Interval // scratch of see
	prompts prompts            // scratch of Build
	launch  writtenLaunch
	prefill writtenPrefill
}

// seen are the LeanTiles in which some row of a block of rows may see some key.
type seen struct {
	lists  list[int32] // of each of seqs the number of its first block of rows
	blocks list[writtenBlock]
	tiles  list[int32]
}

func (l *seen) sections() []entries { return []entries{&l.lists, &l.blocks, &l.tiles} }

func (l *seen) reset() {
	l.lists.data, l.blocks.data, l.tiles.data = l.lists.data[:0], l.blocks.data[:0], l.tiles.data[:0]
}

// want sets the lengths of the lists.
func (l *seen) want(sequences, blocks, tiles [2]int) {
	l.lists.want(sequences[0], sequences[1], 0)
	l.blocks.want(blocks[0], blocks[1], 0)
	l.tiles.want(tiles[0], tiles[1], 0)
}

func (w *written) sections() []entries { return slices.Concat(w.few.sections(), w.many.sections()) }

// hides reports whether LeanTiles may be left out.
func hides(g *attn.Problem) bool {
	return g.Variant != nil && (g.Variant.Visible >= 0 || g.Window > 0)
}

// size sets the lengths of the lists. who says which kernels attend to the step's sequences.
func (w *written) size(e *Engine, g *attn.Problem, need *stepSize, least *Capacity, who division) {
	none := [2]int{}
	w.few.want(none, none, none)
	w.many.want(none, none, none)
	if !hides(g) {
		return
	}
	const most = 1 << 22 // entries that are reserved in advance
	reserved := func(rows, tile int) (blocks, tiles int) {
		blocks = attn.Product(attn.Ceil(attn.Product(least.queries(), g.Group()), rows), least.Sequences)
		return min(blocks, most), min(attn.Product(blocks, attn.Ceil(attn.Product(least.Pages, g.PageTokens), tile)+least.Sequences), most)
	}
	sequences := [2]int{need.Sequences, least.Sequences}
	blocks, tiles := reserved(BlockRows, tileTokens(g))
	w.few.want(sequences, [2]int{int(need.blocks), blocks}, [2]int{int(need.tiles) / g.KVHeads, tiles})
	listed := [2]int{}
	if who.first() != nil {
		listed = [2]int{len(w.prompts.blocks), len(w.prompts.tiles)}
	}
	if k := e.findPrefill(g, max(need.Queries*g.Group(), attn.Product(least.queries(), g.Group()))).first(); k != nil {
		blocks, tiles = reserved(k.tile.rows, cutKeys)
		w.many.want(sequences, [2]int{listed[0], blocks}, [2]int{listed[1], tiles})
	}
}

// see adds to blocks and tiles those of the packed rows [first, end) of a sequence, `number` of the caller's: LeanTiles of `tile` keys. It
// returns how many LeanTiles there are.
func (w *written) see(g *attn.Problem, s *sequence, number, first, end, tile int, blocks *[]writtenBlock, tiles *[]int32) int {
	if len(w.bounds) < len(g.Variant.Nodes) {
		w.bounds = make([]variant.Interval, len(g.Variant.Nodes))
	}
	from, to := first/g.Group(), (end-1)/g.Group() // query positions
	begin, stop := g.Mask.Range(int(s.queries), int(s.keys), from, to+1)
	before := int(s.keys - s.queries)
	limits := variant.Bounds{
		Query: variant.Between(before+from, before+to), Head: variant.Between(0, g.Heads-1), Sequence: variant.Between(number, number),
	}
	b, n, full := writtenBlock{begin: int32(len(*tiles))}, 0, begin < tile
	all := writtenBlock{} // the keys of the LeanTiles since the last in which a key may be hidden
	for i := max(begin, 0) / tile; i*tile < stop; i++ {
		limits.Key = variant.Between(i*tile, min((i+1)*tile, stop)-1)
		sees := g.Variant.Sees(&limits, w.bounds)
		if sees == variant.Never {
			full = false
			continue
		}
		*tiles = append(*tiles, int32(i))
		n++
		switch {
		case sees != variant.Always:
			all = writtenBlock{}
			continue
		case all.count == 0:
			all.from = int32(i * tile)
		}
		if all.count, all.to = all.count+1, int32((i+1)*tile); all.count > b.count {
			b.count, b.from, b.to = all.count, all.from, all.to
		}
	}
	if b.count = int32(n); full { // no list is needed
		*tiles, b.begin = (*tiles)[:b.begin], -1
	}
	*blocks = append(*blocks, b)
	return n
}

// printed are the kernels of variants of an engine.
type printed struct {
	sync.Mutex
	kernels map[string]*compiled // by their sources
	known   map[printedKey]printedKernel
}

// compiled is a kernel that one goroutine compiles while others wait for it.
type compiled struct {
	sync.Mutex
	kernel *kernel // nil: not yet
}

// printedKey identifies a kernel and its numbers: equal keys have equal kernels.
type printedKey struct {
	*variant.Program
	line             any // of a table
	dim              int
	query            attn.DType
	changes, windows bool
	measures         bool
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
	key := keyOf(g, k)
	if made, ok := e.known(key); ok {
		return made, nil
	}
	text := g.Variant.CUDA(loadsOf(g), key.flags())
	source, names := unitOf(g, k, text.Text)
	return e.compile(op, key, k, text.Numbers, source, names)
}

func keyOf(g *attn.Problem, line any) printedKey {
	return printedKey{g.Variant, line, g.Dim, g.QueryType, g.Cap != 0 || g.Slopes != "" || g.Bias != (attn.Bias{}), g.Window > 0, g.Measures}
}

// flags are the constants of an Expression that the variant does not decide.
func (k *printedKey) flags() string {
	return fmt.Sprintf("changes = %t, windows = %t, measures = %t", k.changes, k.windows, k.measures)
}

// loadsOf returns the functions that load elements of the variant's tensors.
func loadsOf(g *attn.Problem) []string {
	loads := make([]string, len(g.Variant.Tensors))
	for i, d := range g.Variant.Tensors {
		if loads[i] = stores[g.QueryType] + "::load"; d.Int {
			loads[i] = "elementOf<int>"
		}
	}
	return loads
}

func (e *Engine) known(key printedKey) (printedKernel, bool) {
	e.printed.Lock()
	defer e.printed.Unlock()
	made, ok := e.printed.known[key]
	return made, ok
}

// compile returns k with the functions of a unit, whose Expression has these numbers.
func (e *Engine) compile(op string, key printedKey, k *kernel, numbers []uint32, source string, names []string) (printedKernel, error) {
	if len(numbers) > writtenNumbers {
		return printedKernel{}, gpu.Errorf(op, attn.ErrUnsupported, "a variant with %d numbers that follow from Params: %d are the most on a GPU", len(numbers), writtenNumbers)
	}
	made := printedKernel{k, numbers}
	if e.dev == nil { // for a schedule alone
		return made, nil
	}
	e.printed.Lock()
	if e.printed.kernels == nil {
		e.printed.kernels = map[string]*compiled{}
	}
	of := e.printed.kernels[source]
	if of == nil {
		of = &compiled{}
		e.printed.kernels[source] = of
	}
	e.printed.Unlock()
	var err error
	if made.kernel, err = of.get(e, op, k, source, names); err != nil {
		return printedKernel{}, err
	}
	const most = 256 // programs that are known, which a map keeps in memory
	e.printed.Lock()
	defer e.printed.Unlock()
	if e.printed.known == nil || len(e.printed.known) >= most {
		e.printed.known = map[printedKey]printedKernel{}
	}
	e.printed.known[key] = made
	return made, nil
}

// unitOf returns the source of a unit for a line of the table, and the names of its kernels. Kernels of other sources have other names.
func unitOf(g *attn.Problem, k *kernel, expression string) (source string, names []string) {
	kind, header, macro, arguments := "written", "attn_written", "WRITTEN_ATTENTION", fmt.Sprintf("%s, %d", formats[k.kv], g.Dim)
	if k.parts > 0 {
		kind, header, macro = "prefill_written", "attn_written_prefill", "WRITTEN_PREFILL"
		arguments = fmt.Sprintf("%s, WrittenPrompt<Expression>, %d, %s", formats[k.kv], g.Dim, k.arguments(restores(g)))
	}
	sum := sha256.Sum256([]byte(expression + arguments))
	name := fmt.Sprintf("%s_%s_%d_%s", kind, gpu.Name(k.kv), g.Dim, hex.EncodeToString(sum[:8]))
	source, names = fmt.Sprintf("#include \"%s.cuh\"\n%s%s(%s, %s)\n", header, expression, macro, name, arguments), []string{name}
	if g.Measures {
		source, names = "#include \"attn_measured.cuh\"\n"+source, append(names, measuredEntry)
	}
	if k.parts == 0 && restores(g) {
		names = append(names, name+"_restore")
		source += "WRITTEN_RESTORE(" + names[1] + ")\n"
	}
	return source, names
}

// get returns k with the functions of a unit. After an error the next call tries again.
func (c *compiled) get(e *Engine, op string, k *kernel, source string, names []string) (*kernel, error) {
	c.Lock()
	defer c.Unlock()
	if c.kernel != nil {
		return c.kernel, nil
	}
	m, err := gpu.Compiled(e.dev, source)
	if err != nil {
		return nil, gpu.Errorf(op, attn.ErrUnsupported, "a variant's kernel: %v", err)
	}
	made := *k
	made.line, made.entries = k, names[:1]
	for _, name := range names {
		f, err := gpu.WithShared(m, name)
		if err != nil {
			return nil, err
		}
		made.functions = append(made.functions, f)
	}
	c.kernel = &made
	return c.kernel, nil
}

// printAll compiles the kernels of lines at the same time. nil is no line.
func (e *Engine) printAll(op string, g *attn.Problem, lines ...*kernel) error {
	var work sync.WaitGroup
	failed := make([]error, len(lines))
	own := *g // g itself stays on the caller's stack
	for i, k := range lines {
		if k != nil {
			work.Go(func() { _, failed[i] = e.print(op, &own, k) })
		}
	}
	work.Wait()
	for _, err := range failed {
		if err != nil {
			return err
		}
	}
	return nil
}

// runWritten queues attention with a variant by a decode kernel.
func (p *Plan) runWritten(s *cuda.Stream, o *Operands, k *kernel) error {
	g, a, l := &p.form.geometry, &p.params, &p.written.launch
	made, err := p.engine.print("run", g, k.line)
	if err != nil {
		return err
	}
	own := p.writtenTo(o)
	grid, err := p.arguments(&own)
	if err != nil {
		return err
	}
	*l = writtenLaunch{keyMap: a.keyMap, valueMap: a.valueMap, Params: a.Params, meet: a.meet, score: p.scoresOf(g, o, k)}
	p.expressionOf(&l.written, o, &made, &p.written.few)
	m := p.measureOf()
	l.written.sums, l.written.chunks = m.sums, m.chunks
	p.args.Reset()
	cuda.Struct(&p.args, l)
	p.hold(o)
	if err := k.functions[0].Launch(s, grid, &p.args); err != nil || p.form.both { // prefill kernels follow
		return err
	}
	if g.Measures {
		return p.finishMeasured(s, o, k)
	}
	return p.restore(s, o, &own)
}

// writtenTo returns the operands of the launches of attention. Where weights are not divided by their sum, results are states for restore.
func (p *Plan) writtenTo(o *Operands) Operands {
	own := *o
	if g := &p.form.geometry; restores(g) {
		lse, end := restoreBytes(g, p.reach)
		own.Out = gpu.Memory{Buffer: p.memory.states, DType: attn.Float32, Len: int(lse / 4)}
		own.LSE = gpu.Memory{Buffer: p.memory.states, Offset: lse, DType: attn.Float32, Len: int(end-lse) / 4}
	}
	return own
}

// expressionOf fills the parameters of a variant's expressions.
func (p *Plan) expressionOf(w *writtenParams, o *Operands, made *printedKernel, by *seen) {
	g := &p.form.geometry
	copy(w.numbers[:], made.numbers)
	if hides(g) {
		w.lists, w.blocks, w.tiles = by.lists.address(&p.memory), by.blocks.address(&p.memory), by.tiles.address(&p.memory)
	}
	for i := range g.Variant.Tensors {
		t := &o.Tensors[i]
		w.tensors[i] = t.Memory.Address()
		for axis, size := range t.Shape {
			w.sizes[i*writtenAxes+axis] = int32(size)
		}
	}
}

// restore queues the launch that multiplies outputs by the sums of their weights, if these are not divided by them.
func (p *Plan) restore(s *cuda.Stream, o, own *Operands) error {
	g := &p.form.geometry
	if !restores(g) {
		return nil
	}
	r := &restoreParams{
		from: own.Out.Address(), logs: own.LSE.Address(), out: o.Out.Address(), seqs: p.seqs.address(&p.memory),
		outRow: int64(g.Out.Row), outHead: int64(g.Out.Head), lseRow: int64(g.LSE.Row), lseHead: int64(g.LSE.Head),
		sequences: int32(len(p.seqs.data)), rows: int32(p.form.rows), heads: int32(g.Heads), dim: int32(g.ValueDim), outType: gpu.Code(o.Out.DType),
	}
	p.args.Reset()
	cuda.Struct(&p.args, r)
	p.hold(o)
	return p.form.kernel.functions[1].Launch(s, cuda.Grid{Blocks: [3]int{p.engine.blocks}, Threads: [3]int{restoreThreads}}, &p.args)
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

// countTiles lists the LeanTiles of the blocks of a sequence, `number` of the caller's, with a variant that hides keys.
func (p *Plan) countTiles(g *attn.Problem, s *sequence, number, block int) {
	w, rows := &p.written, int(s.queries)*g.Group()
	w.few.lists.data = append(w.few.lists.data, int32(len(w.few.blocks.data)))
	for first := 0; first < rows; first += block {
		end := min(first+block, rows)
		n := w.see(g, s, number, first, end, tileTokens(g), &w.few.blocks.data, &w.few.tiles.data)
		p.tiles = append(p.tiles, int64(n))
		if n > 0 {
			continue
		}
		for i := first / g.Group(); i <= (end-1)/g.Group(); i++ {
			if row := s.row + int32(i); len(w.empty) == 0 || w.empty[len(w.empty)-1] != row {
				w.empty = append(w.empty, row)
			}
		}
	}
}

// reset begins the lists of a step.
func (w *written) reset() {
	w.few.reset()
	w.many.reset()
	w.empty = w.empty[:0]
}

// finishLists adds rows without LeanTiles to the masked ones.
func (p *Plan) finishLists(g *attn.Problem) {
	w := &p.written
	if !hides(g) {
		return
	}
	known := p.masked.data[1:]
	slices.Sort(known)
	for _, row := range w.empty {
		if _, there := slices.BinarySearch(known, row); !there {
			p.masked.data = append(p.masked.data, row)
		}
	}
	p.masked.data[0] = int32(len(p.masked.data) - 1)
}
