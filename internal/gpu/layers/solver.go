package layers

import (
	"encoding/binary"
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// solverUnit is the module with the kernels of a solver.
const solverUnit = "solver"

// SolverPiece is the number of elements of a weight whose squares are summed together (kernels/nodes_solver.cuh). Element i of a piece is
// in sum i mod SolverSums. Then sum i gets that of i+n, for n of SolverSums/2, SolverSums/4, ..., 1.
const (
	SolverPiece = 8192
	SolverSums  = trainingThreads
)

// solverKernels are loaded at first use.
type solverKernels struct{ add, squares, total, update *cuda.Function }

// SolverWeight is a weight W of N elements, its gradient G, the sum A of earlier gradients, and its moments M and V, of float32. The sum and
// the moments may have no buffer.
type SolverWeight struct {
	N             int
	W, G, A, M, V gpu.Memory
}

// solverWeight is struct SolverWeight.
type solverWeight struct {
	w, g, a, m, v uint64
	n, first      int64
}

// SolverRule is what a step of a solver does. With h = Scale (A + G) it computes, in float32 and rounding each operation:
//
//	M = Beta1 M + Rest1 H,   V = Beta2 V + Rest2 H H,   U = Correct1 M / (sqrt(Correct2 V) + Epsilon), without Moments U = H
//	W = W - Rate (U + Decay W)
type SolverRule struct {
	Moments                                                                     bool
	Scale, Beta1, Rest1, Beta2, Rest2, Correct1, Correct2, Epsilon, Rate, Decay float32
}

// Solver is the operands of a step.
type Solver struct {
	Weights []SolverWeight
	Table   gpu.Memory // the bytes of [Solver.Bytes]
	Sums    gpu.Memory // a float64 for each of [Solver.Pieces], and one for all; not for an update
	Rule    SolverRule // of an update
}

// solverParams is struct SolverParams.
type solverParams struct {
	weights, sums              uint64
	count, moments, fresh      int32
	scale                      float32
	beta1, rest1, beta2, rest2 float32
	correct1, correct2         float32
	epsilon, rate, decay       float32
	pieces                     int32
}

// Pieces returns the number of pieces of all weights.
func (o *Solver) Pieces() (n int) {
	for i := range o.Weights {
		n += attn.Ceil(o.Weights[i].N, SolverPiece)
	}
	return n
}

// Bytes returns the table of the weights, which tells each thread block its part.
func (o *Solver) Bytes() []byte {
	rows, first := make([]solverWeight, len(o.Weights)), int64(0)
	for i := range rows {
		x := &o.Weights[i]
		rows[i] = solverWeight{w: x.W.Address(), g: x.G.Address(), a: x.A.AddressOr0(), m: x.M.AddressOr0(), v: x.V.AddressOr0(), n: int64(x.N), first: first}
		first += int64(attn.Ceil(x.N, SolverPiece))
	}
	b, _ := binary.Append(nil, binary.LittleEndian, rows) // the types have a size
	return b
}

// SolverRow is the number of bytes of a weight in the table.
const SolverRow = 56

func (o *Solver) check(op string) error {
	if len(o.Weights) == 0 || len(o.Weights) > math.MaxInt32 || o.Pieces() > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "%d weights of %d pieces", len(o.Weights), o.Pieces())
	}
	for i := range o.Weights {
		x := &o.Weights[i]
		if x.N < 1 {
			return gpu.Errorf(op, attn.ErrShape, "weight %d has %d elements", i, x.N)
		}
		for _, m := range []struct {
			name   string
			of     *gpu.Memory
			needed bool
		}{{"a weight", &x.W, true}, {"its gradient", &x.G, true}, {"its sum", &x.A, op == "add" || x.A.Buffer != nil}, {"its mean", &x.M, o.Rule.Moments}, {"its variance", &x.V, o.Rule.Moments}} {
			if !m.needed {
				continue
			}
			if err := checkLooseFloats(op, m.name, m.of, x.N); err != nil {
				return err
			}
		}
	}
	table := o.Table
	table.DType = attn.Float32
	return checkLooseFloats(op, "the table", &table, len(o.Weights)*SolverRow/4)
}

// SolverAdd queues A = A + G for all weights, in one launch, or A = G if fresh.
func (d *Engine) SolverAdd(s *cuda.Stream, o *Solver, fresh bool) error {
	return d.solve(s, o, "add", fresh, o.Pieces(), func(k *solverKernels) *cuda.Function { return k.add })
}

// SolverSquares queues the sum of the squares of each piece of A + G, and the sum of all pieces' sums. The sum of piece i is added to partial
// sum i mod SolverSums, and partial sums are added in the order within a piece.
func (d *Engine) SolverSquares(s *cuda.Stream, o *Solver) error {
	const op = "squares"
	sums := o.Sums
	sums.DType = attn.Float32
	if err := checkLooseFloats(op, "the sums", &sums, 2*(o.Pieces()+1)); err != nil {
		return err
	}
	if err := d.solve(s, o, op, false, o.Pieces(), func(k *solverKernels) *cuda.Function { return k.squares }); err != nil {
		return err
	}
	return d.solve(s, o, op, false, 1, func(k *solverKernels) *cuda.Function { return k.total })
}

// SolverUpdate queues an update of all weights and moments, in one launch.
func (d *Engine) SolverUpdate(s *cuda.Stream, o *Solver) error {
	return d.solve(s, o, "update", false, o.Pieces(), func(k *solverKernels) *cuda.Function { return k.update })
}

func (d *Engine) solve(s *cuda.Stream, o *Solver, op string, fresh bool, blocks int, kernel func(*solverKernels) *cuda.Function) error {
	if err := o.check(op); err != nil {
		return err
	}
	r := &o.Rule
	p := solverParams{
		weights: o.Table.Address(), sums: o.Sums.AddressOr0(), count: int32(len(o.Weights)), scale: r.Scale, beta1: r.Beta1, rest1: r.Rest1, beta2: r.Beta2, rest2: r.Rest2,
		correct1: r.Correct1, correct2: r.Correct2, epsilon: r.Epsilon, rate: r.Rate, decay: r.Decay, pieces: int32(o.Pieces()),
	}
	memory := []gpu.Memory{o.Table, o.Sums}
	for i := range o.Weights {
		x := &o.Weights[i]
		memory = append(memory, x.W, x.G, x.A, x.M, x.V)
	}
	if r.Moments {
		p.moments = 1
	}
	if fresh {
		p.fresh = 1
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.solverKernels == nil {
		k := new(solverKernels)
		if err := d.functions(solverUnit, map[string]**cuda.Function{"solver_add": &k.add, "solver_squares": &k.squares, "solver_total": &k.total, "solver_update": &k.update}); err != nil {
			return err
		}
		d.solverKernels = k
	}
	return queueNode(d, s, kernel(d.solverKernels), blocks, &p, memory...)
}
