package nn

import (
	"encoding/binary"
	"errors"
	"io"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A checkpoint of a solver, all numbers little endian:
//
//	offset  bytes
//	 0      8      "LEANOPT\n"
//	 8      4      version: 1
//	12      4      solver: 1 SGD, 2 AdamW
//	16      4      element type: 1 float32, 2 float64
//	20      4      number of weights
//	24      8      steps
//	32      8      Scale, float64
//	40      8      steps since Scale changed
//	48      4      CRC-32C of all before
//	52             for each weight: bytes of its name (4), name, rank (4), sizes (8 each)
//	        4      CRC-32C of all before
//	               for each weight: its elements; the first and the second moment of AdamW follow
//	end     4      CRC-32C of all before
//
// A later version may change all behind the first 12 bytes.
const (
	savedMagic   = "LEANOPT\n"
	savedVersion = 1
	savedHead    = 48
	savedName    = 4096 // the most bytes of a name
	savedRank    = 32   // the most axes
)

// Save writes a checkpoint for [AdamW.Load]: the weights, the moments, the number of steps, and Scale. Other fields are the caller's.
//
//   - The bytes do not depend on the place of the weights. A node's name is that of its weight.
//   - Save waits for the weights of a GPU, and has one of them at a time in host memory.
//   - Errors: those of Step but for the gradients, which Save does not read; ErrState after Accumulate without Step, and within
//     device.GPU.Record; ErrLength for a name of more than 4096 bytes; errors of w.
func (s *AdamW) Save(w io.Writer, model []G.ValueGrad) error {
	return s.save("AdamW.Save", w, model, s.rule)
}

// Load reads a checkpoint of [AdamW.Save] into the solver and the weights. The steps after are those after Save, to the bit. The weights have
// the shapes, the types and, where both have some, the names that they had, and may be in another place.
//
//   - Load reads to the end of the checkpoint and no further. After an error, solver and weights are as before. The model, and not the data,
//     bounds the memory: the weights and moments once more, and on a GPU a weight in host memory.
//   - Gradients of Accumulate are dropped.
//   - A checksum finds damage. It is no signature: crafted data in the right form load.
//   - Errors: ErrFormat (no checkpoint, damaged, cut short; then also io.EOF if r is empty, else io.ErrUnexpectedEOF), ErrUnsupported (another
//     version, another solver), ErrShape, ErrDType, ErrGraph (other names), those of Step but for the gradients, errors of r.
func (s *AdamW) Load(r io.Reader, model []G.ValueGrad) error {
	return s.load("AdamW.Load", r, model, s.rule)
}

// Save is as [AdamW.Save], without moments.
func (s *SGD) Save(w io.Writer, model []G.ValueGrad) error {
	return s.save("SGD.Save", w, model, s.rule)
}

// Load is as [AdamW.Load], of a checkpoint of [SGD.Save].
func (s *SGD) Load(r io.Reader, model []G.ValueGrad) error {
	return s.load("SGD.Load", r, model, s.rule)
}

// savedKind is the number of a solver in a checkpoint.
func (r *solverRule) savedKind() uint32 {
	if r.moments {
		return 2
	}
	return 1
}

// savedParts is the number of parts of a weight in a checkpoint: the weight and its moments.
func (r *solverRule) savedParts() int {
	if r.moments {
		return 3
	}
	return 1
}

var (
	savedSolvers = map[uint32]string{1: "SGD", 2: "AdamW"}
	savedTypes   = map[uint32]tensor.Dtype{1: tensor.Float32, 2: tensor.Float64}
)

func (s *solver) save(title string, to io.Writer, model []G.ValueGrad, of ruleOf) error {
	if to == nil {
		return errorf(title, errs.ErrState, "w is nil")
	}
	return s.locked(title, model, false, of, func(ws []trainedWeight, rule *solverRule) error {
		if s.runs > 0 {
			return errorf(title, errs.ErrState, "the gradients of Accumulate (calls: %d) wait for Step: save between steps", s.runs)
		}
		if ws[0].dtype == tensor.Float64 {
			return saveAs[float64](s, title, to, model, ws, rule)
		}
		return saveAs[float32](s, title, to, model, ws, rule)
	})
}

func saveAs[F float](s *solver, title string, to io.Writer, model []G.ValueGrad, ws []trainedWeight, rule *solverRule) error {
	shapes, err := savedShapes(title, model, ws)
	if err != nil {
		return err
	}
	state, err := stateOf[F](s, title, ws, rule)
	if err != nil {
		return err
	}
	out := &operand.SumWriter{W: to, Op: prefix + title}
	for _, part := range [][]byte{s.savedHeader(ws, rule), shapes} {
		if err := out.Write(part); err != nil {
			return err
		}
		if err := out.Write(binary.LittleEndian.AppendUint32(nil, out.Sum)); err != nil {
			return err
		}
	}
	var buffer []byte
	for i := range ws {
		for moment := range rule.savedParts() {
			all, err := state(i, moment)
			if err != nil {
				return err
			}
			for part := range slices.Chunk(all, savedPiece) {
				if buffer, err = binary.Append(buffer[:0], binary.LittleEndian, part); err != nil {
					return err
				}
				if err := out.Write(buffer); err != nil {
					return err
				}
			}
		}
	}
	return out.Write(binary.LittleEndian.AppendUint32(nil, out.Sum))
}

// savedPiece is the number of elements that are written or read together.
const savedPiece = 1 << 17

// savedHeader returns the first bytes of a checkpoint.
func (s *solver) savedHeader(ws []trainedWeight, rule *solverRule) []byte {
	b := append(make([]byte, 0, savedHead), savedMagic...)
	kind := uint32(1)
	if ws[0].dtype == tensor.Float64 {
		kind = 2
	}
	for _, n := range [...]uint32{savedVersion, rule.savedKind(), kind, uint32(len(ws))} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(s.steps))
	b = binary.LittleEndian.AppendUint64(b, math.Float64bits(*rule.lossScale))
	return binary.LittleEndian.AppendUint64(b, uint64(s.grown))
}

// nodeName returns the name of a weight, "" without one.
func nodeName(n G.ValueGrad) string {
	if node, ok := n.(*G.Node); ok {
		return stock.NameOf(node)
	}
	return ""
}

// savedShapes returns the names and shapes of all weights.
func savedShapes(title string, model []G.ValueGrad, ws []trainedWeight) (b []byte, err error) {
	for i, w := range ws {
		name := nodeName(model[i])
		if len(name) > savedName || len(w.shape) > savedRank {
			return nil, errorf(title, errs.ErrLength, "weight %d has a name of %d bytes and rank %d, want at most %d and %d", i, len(name), len(w.shape), savedName, savedRank)
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(name))), name...)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(w.shape)))
		for _, n := range w.shape {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
	}
	return b, nil
}

// stateOf returns a function that returns the elements of weight i, or its moment 1 or 2.
func stateOf[F float](s *solver, title string, ws []trainedWeight, rule *solverRule) (func(i, moment int) ([]F, error), error) {
	if ws[0].at != nil {
		o := s.gpuOf(title, ws, rule)
		moments, _ := o.Parts()
		return func(i, moment int) ([]F, error) {
			d := o.Weights[i]
			switch {
			case moment > 0 && moments == nil:
				return dense.Make[F](d.Size()), nil
			case moment > 0:
				d = moments[2*i+moment-1]
			}
			t, err := d.Download()
			if err != nil {
				return nil, err
			}
			return dense.Backing[F](t), nil
		}, o.Check()
	}
	all, err := readHost[F](s, title, ws)
	if err != nil {
		return nil, err
	}
	moments, _ := s.here.([][2][]F)
	if moments == nil {
		moments = newMoments(all, rule.moments)
	}
	return func(i, moment int) ([]F, error) {
		if moment == 0 {
			return all[i].w, nil
		}
		return moments[i][moment-1], nil
	}, nil
}

func (s *solver) load(title string, from io.Reader, model []G.ValueGrad, of ruleOf) error {
	if from == nil {
		return errorf(title, errs.ErrState, "r is nil")
	}
	return s.locked(title, model, false, of, func(ws []trainedWeight, rule *solverRule) error {
		in := &operand.SumReader{R: from, Op: prefix + title}
		head, err := readSavedHeader(in, title, ws, rule)
		if err != nil {
			return err
		}
		if err := readSavedShapes(in, title, model, ws); err != nil {
			return err
		}
		switch {
		case ws[0].at != nil:
			err = s.loadOnGPU(in, title, ws, rule)
		case ws[0].dtype == tensor.Float64:
			err = loadAs[float64](s, in, title, ws, rule)
		default:
			err = loadAs[float32](s, in, title, ws, rule)
		}
		if err != nil {
			return err
		}
		s.remember(ws)
		s.steps, s.grown, s.runs, *rule.lossScale = head.steps, head.grown, 0, head.scale
		return nil
	})
}

// savedState is what the header of a checkpoint has of a solver's state.
type savedState struct {
	steps, grown int
	scale        float64
}

func readSavedHeader(in *operand.SumReader, title string, ws []trainedWeight, rule *solverRule) (head savedState, err error) {
	b := make([]byte, savedHead)
	begin := len(savedMagic) + 4 // what every version has
	if err := in.Read(b[:begin]); err != nil {
		return head, err
	}
	if string(b[:len(savedMagic)]) != savedMagic {
		return head, errorf(title, errs.ErrFormat, "it begins with %q and not with %q: it is no checkpoint of a solver", b[:len(savedMagic)], savedMagic)
	}
	field := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if v := field(8); v != savedVersion {
		return head, errorf(title, errs.ErrUnsupported, "a checkpoint of version %d; this package reads version %d", v, savedVersion)
	}
	if err := in.Read(b[begin:]); err != nil {
		return head, err
	}
	if err := in.Check("the header"); err != nil {
		return head, err
	}
	is, ok := savedTypes[field(16)]
	switch name, known := savedSolvers[field(12)]; {
	case !known || !ok:
		return head, errorf(title, errs.ErrFormat, "solver %d and element type %d, want each 1 or 2", field(12), field(16))
	case field(12) != rule.savedKind():
		return head, errorf(title, errs.ErrUnsupported, "a checkpoint of %s, and the solver is %s", name, savedSolvers[rule.savedKind()])
	case is != ws[0].dtype:
		return head, errorf(title, errs.ErrDType, "the checkpoint is of %v and %s of %v", is, ws[0].name, ws[0].dtype)
	case uint64(field(20)) != uint64(len(ws)):
		return head, errorf(title, errs.ErrShape, "the number of weights is %d in the checkpoint and %d in the model", field(20), len(ws))
	}
	steps, grown := binary.LittleEndian.Uint64(b[24:]), binary.LittleEndian.Uint64(b[40:])
	head = savedState{int(steps), int(grown), math.Float64frombits(binary.LittleEndian.Uint64(b[32:]))}
	if steps >= math.MaxInt || grown > steps {
		return head, errorf(title, errs.ErrFormat, "%d steps, %d of them since the scale changed", steps, grown)
	}
	if x := head.scale; x != 0 && !(x >= leastOption && x <= mostOption) {
		return head, errorf(title, errs.ErrFormat, "Scale is %v, want 0, or a number from %v to %v", x, leastOption, float64(mostOption))
	}
	return head, nil
}

// readSavedShapes compares the names and shapes of a checkpoint with those of a model.
func readSavedShapes(in *operand.SumReader, title string, model []G.ValueGrad, ws []trainedWeight) error {
	number := func(most uint32, what string) (int, error) {
		var b [4]byte
		if err := in.Read(b[:]); err != nil {
			return 0, err
		}
		n := binary.LittleEndian.Uint32(b[:])
		if n > most {
			return 0, errorf(title, errs.ErrFormat, "%s is %d, more than %d", what, n, most)
		}
		return int(n), nil
	}
	var differ error // the first difference, if nothing is damaged
	for i := range ws {
		n, err := number(savedName, "the length of a name")
		if err != nil {
			return err
		}
		name := make([]byte, n)
		if err := in.Read(name); err != nil {
			return err
		}
		if n, err = number(savedRank, "a rank"); err != nil {
			return err
		}
		sizes, shape := make([]byte, 8*n), make([]uint64, n)
		if err := in.Read(sizes); err != nil {
			return err
		}
		same := n == len(ws[i].shape)
		for axis := range shape {
			shape[axis] = binary.LittleEndian.Uint64(sizes[8*axis:])
			same = same && shape[axis] == uint64(ws[i].shape[axis])
		}
		switch have := nodeName(model[i]); {
		case differ != nil:
		case have != "" && len(name) > 0 && have != string(name):
			differ = errorf(title, errs.ErrGraph, "weight %d is %q in the checkpoint and %q in the model", i, name, have)
		case !same:
			differ = errorf(title, errs.ErrShape, "%s has shape %v in the checkpoint and %v in the model", ws[i].name, shape, ws[i].shape)
		}
	}
	if err := in.Check("the shapes"); err != nil {
		return err
	}
	return differ
}

// readElements reads the elements of a weight or a moment.
func readElements[F float](in *operand.SumReader, x []F) error {
	var buffer []byte
	for part := range slices.Chunk(x, savedPiece) {
		n := binary.Size(part)
		buffer = slices.Grow(buffer[:0], n)[:n]
		if err := in.Read(buffer); err != nil {
			return err
		}
		if _, err := binary.Decode(buffer, binary.LittleEndian, part); err != nil {
			return err
		}
	}
	return nil
}

func loadAs[F float](s *solver, in *operand.SumReader, title string, ws []trainedWeight, rule *solverRule) error {
	all, err := readHost[F](s, title, ws)
	if err != nil {
		return err
	}
	moments, fresh := newMoments(all, rule.moments), make([][]F, len(all))
	for i := range all {
		fresh[i] = dense.Make[F](len(all[i].w))
		for _, x := range append([][]F{fresh[i]}, moments[i][:rule.savedParts()-1]...) {
			if err := readElements(in, x); err != nil {
				return err
			}
		}
	}
	if err := in.Check("the data"); err != nil {
		return err
	}
	for i := range all {
		copy(all[i].w, fresh[i])
	}
	s.here = moments
	return nil
}

func (s *solver) loadOnGPU(in *operand.SumReader, title string, ws []trainedWeight, rule *solverRule) (err error) {
	o := s.gpuOf(title, ws, rule)
	o.Kept, o.Added, o.Pending = nil, nil, false
	defer func() { err = errors.Join(err, free(o.Added, o.Kept)) }()
	if err := o.New(); err != nil {
		return err
	}
	moments, weights := o.Parts()
	each := len(moments) / len(weights)
	for i, w := range weights {
		for _, d := range append([]*ongpu.Tensor{w}, moments[each*i:each*(i+1)]...) {
			t := dense.New(tensor.Float32, d.Shape...)
			if err := readElements(in, dense.Backing[float32](t)); err != nil {
				return err
			}
			if err := d.CopyFrom(t); err != nil {
				return err
			}
		}
	}
	if err := in.Check("the data"); err != nil {
		return err
	}
	if err := o.Replace(); err != nil {
		return err
	}
	s.there, o.Kept = o.Kept, s.there
	return nil
}

// free frees the tensors that there are.
func free(all ...*ongpu.Tensor) (err error) {
	for _, d := range all {
		if d != nil {
			err = errors.Join(err, d.Free())
		}
	}
	return err
}
