package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// lossUnit is the module with the kernels of the loss and of the gradient of an embedding.
const lossUnit = "loss"

// Limits of the logits in memory: so many, or those of lossRows. A product of the gradients has a thread block for each 128 x 128 of
// rows x Width, so fewer logits would leave multiprocessors idle.
const (
	mostLogits = 1 << 27
	lossRows   = 64
)

// tableColumns is LOSS_COLUMNS (kernels/nodes_loss.cuh).
const tableColumns = 4 * trainingThreads

// lossKernels are loaded at first use.
type lossKernels struct{ row, sums, table *cuda.Function }

// launchLoss queues a kernel of the unit, with one struct of parameters.
func launchLoss[P any](d *Engine, s *cuda.Stream, kernel func(*lossKernels) *cuda.Function, blocks int, p *P, memory ...gpu.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lossKernels == nil {
		k := new(lossKernels)
		if err := d.functions(lossUnit, map[string]**cuda.Function{"loss_row": &k.row, "loss_sums": &k.sums, "loss_table": &k.table}); err != nil {
			return err
		}
		d.lossKernels = k
	}
	return queueNode(d, s, kernel(d.lossKernels), blocks, p, memory...)
}

// Loss is the operands of the cross-entropy of logits X W^T + B, of float32: X is Rows x Width and W is Vocabulary x Width. B may have
// no buffer. Targets has a token of int32 for each row, or -1 for a row that does not count.
//
// Without the buffer DY, the result is Y, the loss of each row. With DY, the gradient of Y, the results are DX, DW and, with B, DB. Y is then
// the loss of the same operands, or has no buffer. With the loss, the launch reads logits once; without, twice. A target outside of the
// vocabulary makes NaN.
type Loss struct {
	Rows, Width, Vocabulary int
	X, W, B, Targets        gpu.Memory
	Y, DY, DX, DW, DB       gpu.Memory
	Scratch                 gpu.Memory // as many elements as [Engine.LossScratch] returns
	Products                attn.DType // as [Linear.Products], of x, w and the gradient of logits
}

// lossParams is struct LossParams.
type lossParams struct {
	logits, bias, targets, dy, loss uint64
	size, step                      int64
	rounded                         uint64
	dtype                           int32
	_                               [4]byte
}

// lossSumsParams is struct LossSumsParams.
type lossSumsParams struct {
	sums  sumsParams
	first int32
	_     [4]byte
}

// piece returns the number of rows whose logits are in memory.
func (d *Engine) piece(o *Loss) int {
	most := mostLogits
	if o.rounds() {
		most = mostRoundedLogits
	}
	if d.multipliesLoss(o) {
		most = mostLogitsOfProducts
	}
	if d.logits > 0 {
		most = d.logits
	}
	rows := max(most/o.Vocabulary, lossRows)
	if tile := hopperPair * hopperRows; d.multipliesLoss(o) && rows > tile {
		rows = rows / tile * tile // of whole tiles
	}
	return min(rows, o.Rows)
}

// LossScratch returns the scratch memory of a Loss, in float32 elements: the transpose of W and logits, or what products of rounded
// numbers need. The operands need no memory. The error is the driver's.
func (d *Engine) LossScratch(o *Loss) (int, error) {
	exact := *o
	exact.Products = 0
	plain := attn.Ceil(attn.Product(o.Width, o.Vocabulary), 4)*4 + attn.Product(d.piece(&exact), o.Vocabulary)
	if !o.rounds() {
		return plain, nil
	}
	if d.multipliesLoss(o) {
		r, err := d.lossProductsOf(o)
		return max(plain, r.scratch), err
	}
	r, err := d.roundedLossOf(o)
	return max(plain, r.scratch), err
}

func (o *Loss) check(op string) error {
	if min(o.Rows, o.Width, o.Vocabulary) < 1 || max(o.Rows, o.Width, o.Vocabulary) > math.MaxInt32-trainingTile {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements, and %d tokens", o.Rows, o.Width, o.Vocabulary)
	}
	targets := o.Targets
	targets.DType = attn.Float32 // of the same width
	type operand struct {
		name string
		of   *gpu.Memory
		n    int
	}
	xs, ws := attn.Product(o.Rows, o.Width), attn.Product(o.Vocabulary, o.Width)
	all := []operand{{"x", &o.X, xs}, {"w", &o.W, ws}, {"the targets", &targets, o.Rows}}
	if o.B.Buffer != nil {
		all = append(all, operand{"b", &o.B, o.Vocabulary})
	}
	if o.DY.Buffer == nil || o.Y.Buffer != nil {
		all = append(all, operand{"the loss", &o.Y, o.Rows})
	}
	if o.DY.Buffer != nil {
		all = append(all, operand{"the loss's gradient", &o.DY, o.Rows}, operand{"dx", &o.DX, xs}, operand{"dw", &o.DW, ws})
		if o.B.Buffer != nil {
			all = append(all, operand{"db", &o.DB, o.Vocabulary})
		}
	}
	if err := checkProducts(op, o.Products); err != nil {
		return err
	}
	for _, x := range all {
		if err := checkLooseFloats(op, x.name, x.of, x.n); err != nil {
			return err
		}
	}
	return nil
}

// Loss queues a Loss, one piece of the rows after another. The bits are the same on every run.
func (d *Engine) Loss(s *cuda.Stream, o *Loss) error {
	const op = "loss"
	if err := o.check(op); err != nil {
		return err
	}
	need, err := d.LossScratch(o)
	if err != nil {
		return err
	}
	if err := o.Scratch.CheckFloats(op, "the scratch", need); err != nil {
		return err
	}
	if o.rounds() && o.aligned() {
		return d.roundedLoss(s, o)
	}
	exact := *o
	exact.Products = 0
	if o.DY.Buffer != nil {
		exact.Y = gpu.Memory{} // the loss may be that of rounded logits
	}
	o = &exact
	turned, logits := o.Scratch, o.Scratch
	turned.Len = attn.Product(o.Width, o.Vocabulary)
	before := attn.Ceil(turned.Len, 4) * 4
	logits.Offset, logits.Len = logits.Offset+4*int64(before), logits.Len-before
	if err := d.transpose(s, o.Vocabulary, o.Width, o.Width, o.Vocabulary, o.W, turned); err != nil {
		return err
	}
	piece := d.piece(o)
	for from := 0; from < o.Rows; from += piece {
		rows := min(piece, o.Rows-from)
		x := o.X
		x.Offset, x.Len = x.Offset+4*int64(from)*int64(o.Width), rows*o.Width
		if err := d.Product(s, &Product{M: rows, N: o.Vocabulary, K: o.Width, A: x, B: turned, C: logits}); err != nil {
			return err
		}
		if err := d.lossOfRows(s, o, from, rows, logits, gpu.Memory{}); err != nil {
			return err
		}
		if o.DY.Buffer == nil {
			continue
		}
		if err := d.lossGradients(s, o, from, rows, x, logits); err != nil {
			return err
		}
	}
	return nil
}

// lossOfRows queues the loss of `rows` rows, from row `from` on, or with DY the gradient of their logits. The gradient replaces the logits or,
// if rounded has a buffer, goes to rounded in the type of rounded.
func (d *Engine) lossOfRows(s *cuda.Stream, o *Loss, from, rows int, logits, rounded gpu.Memory) error {
	at := 4 * uint64(from)
	p := lossParams{logits: logits.Address(), bias: o.B.AddressOr0(), targets: o.Targets.Address() + at, size: int64(o.Vocabulary), step: int64(o.wide()), rounded: rounded.AddressOr0(), dtype: gpu.Code(rounded.DType)}
	if o.DY.Buffer != nil {
		p.dy = o.DY.Address() + at
		if o.Y.Buffer != nil {
			p.loss = o.Y.Address() + at
		}
	} else {
		p.loss = o.Y.Address() + at
	}
	return launchLoss(d, s, func(k *lossKernels) *cuda.Function { return k.row }, rows, &p, logits, rounded, o.B, o.Targets, o.DY, o.Y)
}

// lossGradients queues the contribution of `rows` rows, from row `from` on, to the gradients. of is the gradient of the logits of the rows.
func (d *Engine) lossGradients(s *cuda.Stream, o *Loss, from, rows int, x, of gpu.Memory) error {
	dx := o.DX
	dx.Offset, dx.Len = dx.Offset+4*int64(from)*int64(o.Width), rows*o.Width
	if err := d.Product(s, &Product{M: rows, N: o.Width, K: o.Vocabulary, A: of, B: o.W, C: dx}); err != nil {
		return err
	}
	dw := Product{M: o.Vocabulary, N: o.Width, K: rows, Transposed: true, A: of, B: x, C: o.DW}
	if from > 0 {
		dw.Plus = o.DW
	}
	if err := d.Product(s, &dw); err != nil {
		return err
	}
	return d.lossBias(s, o, from, rows, of)
}

// lossBias queues the contribution of rows to the gradient of the bias, if there is one.
func (d *Engine) lossBias(s *cuda.Stream, o *Loss, from, rows int, of gpu.Memory) error {
	if o.B.Buffer == nil {
		return nil
	}
	p := lossSumsParams{sums: sumsParams{x: of.Address(), y: o.DB.Address(), rows: int32(rows), n: int32(o.Vocabulary), step: int32(o.wide())}}
	if from == 0 {
		p.first = 1
	}
	return launchLoss(d, s, func(k *lossKernels) *cuda.Function { return k.sums }, attn.Ceil(o.Vocabulary, trainingColumns), &p, of, o.DB)
}

// TableGradient is the operands of the gradient of a table of TableRows x N elements, of which each row of DY was made from the row with
// its id: the sum of these rows of DY, in their order. DY and DTable are float32, IDs int32. Rows with an id outside of the table are
// left out.
type TableGradient struct {
	Rows, N, TableRows int
	IDs, DY, DTable    gpu.Memory
}

// tableGradientParams is struct TableGradientParams.
type tableGradientParams struct {
	ids, dy, table     uint64
	rows, n, tableRows int32
	_                  [4]byte
}

// TableGradient queues a TableGradient. The bits are those of sums in host memory.
func (d *Engine) TableGradient(s *cuda.Stream, o *TableGradient) error {
	const op = "gradient of a table"
	if min(o.Rows, o.N, o.TableRows) < 1 || max(o.Rows, o.N, o.TableRows) > math.MaxInt32-tableColumns {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements from a table of %d", o.Rows, o.N, o.TableRows)
	}
	blocks := attn.Product(o.Rows, attn.Ceil(o.N, tableColumns))
	if blocks > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrUnsupported, "%d rows of %d elements", o.Rows, o.N)
	}
	ids := o.IDs
	ids.DType = attn.Float32 // of the same width
	for _, x := range []struct {
		name string
		of   *gpu.Memory
		n    int
	}{{"the ids", &ids, o.Rows}, {"dy", &o.DY, attn.Product(o.Rows, o.N)}, {"the table's gradient", &o.DTable, attn.Product(o.TableRows, o.N)}} {
		if err := checkLooseFloats(op, x.name, x.of, x.n); err != nil {
			return err
		}
	}
	if err := s.Set(o.DTable.Buffer, o.DTable.Offset, 0, 4*int64(attn.Product(o.TableRows, o.N))); err != nil {
		return err
	}
	p := tableGradientParams{ids: o.IDs.Address(), dy: o.DY.Address(), table: o.DTable.Address(), rows: int32(o.Rows), n: int32(o.N), tableRows: int32(o.TableRows)}
	return launchLoss(d, s, func(k *lossKernels) *cuda.Function { return k.table }, blocks, &p, o.IDs, o.DY, o.DTable)
}
