package decoder

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// exchangeUnit is the module with the kernels of an [Exchange].
const exchangeUnit = "exchange"

// Constants of the kernels (kernels/exchange.cuh).
const (
	exchangeMembers = MostMembers
	exchangeThreads = 256
	exchangeBlocks  = 256
	exchangeFlags   = 256
	exchangeInbox   = exchangeFlags + 2*exchangeMembers*exchangeBlocks*4
	exchangeEach    = 4
	exchangeLists   = 3
)

// MostMembers is how many GPUs an [Exchange] can be for.
const MostMembers = 8

// exchangeFew is how many bytes of floats an inbox holds.
const exchangeFew = 512 << 10

// fewFloats is how many floats a member sends as tagged words at most, to one other, by operation. More are read and written in
// place. Words take twice the bytes, which go to each of the others, and save a wait.
type fewFloats struct{ reduce, gather, merge int }

// fewOfMembers is by measurement for two and four GPUs (BenchmarkGPUsExchange). Three have what four have, more of them less:
// words go to each of the others.
func fewOfMembers(members int) fewFloats {
	if members == 2 {
		return fewFloats{exchangeFew / 4, exchangeFew / 4, exchangeFew / 4}
	}
	const ofFour = 3 // others
	kib := func(n int) int { return (n << 10) / 4 * ofFour / max(members-1, ofFour) }
	return fewFloats{reduce: kib(160), gather: kib(512), merge: kib(176)}
}

// ExchangeLimit is how long a kernel waits for the other GPUs, where [NewExchange] is told no limit.
const ExchangeLimit = 10 * time.Second

// ErrNoAnswer is a GPU that did not come to an exchange in time.
var ErrNoAnswer = errors.New("a GPU of the group did not answer")

// Exchange is what the GPUs of a group sum, gather, merge and choose tokens through: memory of each, which all others write to. Its memory
// never moves, so recordings may have it.
//
// Each member has to be given the same operations in the same order, each on a stream whose work before is done before,
// and they run at the same time: an operation of one member ends when all others have come to it. So no member may wait,
// in its stream or on the host, for the end of one that another member has not been given yet.
//
// A kernel that has waited for longer than the limit gives up. From then on all operations of the group end at once, their
// results are worth nothing, and [Exchange.Failed] says who did not answer; such a group can only be closed. But where the host
// knows that an operation could not be given to all members, they go on behind [Exchange.Realign].
type Exchange struct {
	engines []*Engine
	kernels []*exchangeKernels
	memory  []*cuda.Buffer
	status  *cuda.Host // a word of each member: who did not answer it, + 1, and in which round
	blocks  int
	limit   time.Duration
	few     fewFloats             // tests have others
	lost    atomic.Pointer[error] // of a Realign that failed
}

// exchangeKernels are those of one device.
type exchangeKernels struct {
	allReduce, allGather, mergeStates [2]*cuda.Function // of few elements, and of many
	allArgMax                         *cuda.Function
	nothing                           *cuda.Function
}

// exchangeGroup is struct ExchangeGroup.
type exchangeGroup struct {
	memory          [exchangeMembers]uint64
	status          uint64
	limit, capacity int64
	members, me     int32
}

// allReduceParams is struct AllReduceParams.
type allReduceParams struct {
	group          exchangeGroup
	x, y           [exchangeMembers]uint64
	bias, residual uint64
	count          int64
	n              int32
	_              [4]byte
}

// gatherList is struct GatherList.
type gatherList struct {
	x     uint64
	y     [exchangeMembers]uint64
	first [exchangeMembers + 1]int32
	fours int32
}

// allGatherParams is struct AllGatherParams.
type allGatherParams struct {
	group                  exchangeGroup
	list                   [exchangeLists]gatherList
	lists, rows, onlyFirst int32
	_                      [4]byte
}

// allArgMaxParams is struct AllArgMaxParams.
type allArgMaxParams struct {
	group       exchangeGroup
	sample      sampleParams
	rows, first int32
}

// NewExchange makes what the engines' GPUs, 2 to 8 of them, exchange through, and loads the kernels: later nothing has to be
// loaded while a GPU waits. Each GPU is to reach the memory of all others. limit is how long a kernel may wait; 0 is
// [ExchangeLimit].
//
// Errors: [attn.ErrUnsupported] for another number of GPUs, attn.ErrShape for one that is there twice or a limit
// below 0, kernels.ErrNoImage, [cuda.ErrNoPeerAccess], and the driver's. Nothing is left of it then.
func NewExchange(engines []*Engine, limit time.Duration) (x *Exchange, err error) {
	const op = "exchange"
	if len(engines) < 2 || len(engines) > exchangeMembers {
		return nil, gpu.Errorf(op, attn.ErrUnsupported, "%d GPUs; it is for 2 to %d", len(engines), exchangeMembers)
	}
	if limit < 0 {
		return nil, gpu.Errorf(op, attn.ErrShape, "a limit of %v", limit)
	}
	if limit == 0 {
		limit = ExchangeLimit
	}
	for i, a := range engines {
		for _, b := range engines[:i] {
			if a.info.Ordinal == b.info.Ordinal {
				return nil, gpu.Errorf(op, attn.ErrShape, "GPU %d is in the group twice", a.info.Ordinal)
			}
		}
	}
	x = &Exchange{engines: engines, blocks: exchangeBlocks, limit: limit, few: fewOfMembers(len(engines))}
	defer func() {
		if err != nil {
			_ = x.Close() // the first error tells more
			x = nil
		}
	}()
	for _, d := range engines {
		for _, other := range engines {
			if d == other {
				continue
			}
			if err := d.dev.Reach(other.dev); err != nil {
				return x, err
			}
		}
		x.blocks = min(x.blocks, max(d.info.Multiprocessors, 1))
		k, err := loadExchange(d.dev)
		if err != nil {
			return x, err
		}
		x.kernels = append(x.kernels, k)
	}
	if x.status, err = engines[0].dev.NewHost(8 * exchangeMembers); err != nil {
		return x, err
	}
	clear(x.status.Bytes())
	bytes := int64(exchangeInbox + 2*exchangeMembers*(exchangeFew/4)*8)
	for _, d := range engines {
		b, err := d.dev.NewBuffer(bytes)
		if err != nil {
			return x, err
		}
		x.memory = append(x.memory, b)
		if err := b.Set(0, 0, bytes); err != nil {
			return x, err
		}
	}
	return x, nil
}

func loadExchange(dev *cuda.Device) (*exchangeKernels, error) {
	m, err := gpu.Module(dev, exchangeUnit)
	if err != nil {
		return nil, err
	}
	k := new(exchangeKernels)
	for name, f := range map[string]**cuda.Function{
		"exchange_all_reduce_few": &k.allReduce[0], "exchange_all_reduce_many": &k.allReduce[1],
		"exchange_all_gather_few": &k.allGather[0], "exchange_all_gather_many": &k.allGather[1],
		"exchange_merge_states_few": &k.mergeStates[0], "exchange_merge_states_many": &k.mergeStates[1],
		"exchange_all_arg_max": &k.allArgMax, "exchange_nothing": &k.nothing,
	} {
		if *f, err = m.Function(name); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// Bytes is what the exchange takes of each GPU's memory.
func (x *Exchange) Bytes() int64 { return x.memory[0].Len() }

// Failed says which GPU did not answer, once that is known: when the operations that waited for it are done. It wraps
// [ErrNoAnswer], and is nil while all is well. It waits for nothing.
func (x *Exchange) Failed() error {
	if lost := x.lost.Load(); lost != nil {
		return *lost
	}
	words := x.status.Bytes()
	if words == nil {
		return cuda.ErrClosed
	}
	for i, d := range x.engines {
		word := atomic.LoadUint64((*uint64)(unsafe.Pointer(&words[8*i])))
		if who := int(word >> 32); who > 0 && who <= len(x.engines) {
			return fmt.Errorf("gpu: exchange: GPU %d did not answer GPU %d in round %d within %v: %w",
				x.engines[who-1].info.Ordinal, d.info.Ordinal, uint32(word), x.limit, ErrNoAnswer)
		}
	}
	return nil
}

// Realign has members agree again on what comes next, when one of them could not be given an operation that others may have been
// given, and so wait for it: finish waits for the work of all members, which ends within the limit. What was computed before
// the operation is right. On an error the group can only be closed, and [Exchange.Failed] says so.
func (x *Exchange) Realign(finish func() error) error {
	err := finish()
	for _, b := range x.memory {
		if err == nil {
			err = b.Set(0, 0, b.Len())
		}
	}
	if err != nil {
		err = fmt.Errorf("gpu: exchange: an operation was not given to all GPUs, and they can't begin anew: %w: %w", ErrNoAnswer, err)
		x.lost.Store(&err)
		return err
	}
	words := x.status.Bytes()
	for i := range x.engines {
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&words[8*i])), 0)
	}
	return nil
}

// Close waits for the work of all members and gives the memory back. It is cuda.ErrClosed where that is so already.
func (x *Exchange) Close() error {
	var errs []error
	closed := 0
	note := func(err error) {
		if errors.Is(err, cuda.ErrClosed) { // with its device
			closed++
			err = nil
		}
		errs = append(errs, err)
	}
	for _, b := range x.memory {
		note(b.Close())
	}
	if x.status != nil {
		note(x.status.Close())
	}
	if closed > 0 && closed == len(errs) {
		return cuda.ErrClosed
	}
	return errors.Join(errs...)
}

// AllReduce is the operands of
//
//	Y = X_0 + X_1 + ... + B + Residual
//
// of Rows x N elements of float32, summed in this order: all members get the same bits. X is of each member, in its memory,
// as are the others. B, of N elements, and Residual may have no buffer, on all members alike, and are the same on all
// of them. Y of a member may be its X or its Residual.
type AllReduce struct {
	Rows, N           int
	X, B, Residual, Y []gpu.Memory // of each member; B and Residual may be nil
}

// AllGather is the operands of Y = the columns of all members side by side, of Rows rows of float32. Member i has
// Columns[i] of them, at least one, in X[i]. With OnlyFirst the first member alone gets Y. Y is no X.
type AllGather struct {
	Rows      int
	Columns   []int
	X, Y      []gpu.Memory // of each member; Y of the first alone with OnlyFirst
	OnlyFirst bool
}

// ArgMaxRows is how many rows an [AllArgMax] has at most: a row takes two words of an inbox.
const ArgMaxRows = exchangeFew / 4 / 2

// AllArgMax is the operands of the most likely token of each of Rows rows of logits, which are the columns of all members side
// by side, as [Samples] without settings says: all members get the same. Member i has Columns[i] of them, at least one, in
// X[i].
type AllArgMax struct {
	Rows    int
	Columns []int
	X       []gpu.Memory // of each member
	IDs     []gpu.Bytes
}

// engine is a member's.
func (x *Exchange) engine(op string, member int) (*Engine, error) {
	if member < 0 || member >= len(x.engines) {
		return nil, gpu.Errorf(op, attn.ErrShape, "member %d of %d", member, len(x.engines))
	}
	return x.engines[member], nil
}

// member checks that there is one, and that it is d's.
func (x *Exchange) member(op string, d *Engine, member int) error {
	if e, err := x.engine(op, member); err != nil || e == d {
		return err
	}
	return gpu.Errorf(op, attn.ErrShape, "member %d is GPU %d, and not the engine of GPU %d", member, x.engines[member].info.Ordinal, d.info.Ordinal)
}

// group is what kernels of a member know.
func (x *Exchange) group(member int) exchangeGroup {
	words := x.status.Bytes()
	g := exchangeGroup{limit: x.limit.Nanoseconds(), capacity: exchangeFew / 4, members: int32(len(x.engines)), me: int32(member)}
	if words != nil {
		g.status = uint64(uintptr(unsafe.Pointer(&words[8*member])))
	}
	for i, b := range x.memory {
		g.memory[i] = b.Address()
	}
	return g
}

// operands checks one of each member, of so many elements, which kernels may be given. A missing list of an optional one
// is one of none.
func (x *Exchange) operands(op, name string, list []gpu.Memory, optional bool, elements func(member int) int) error {
	if optional && list == nil {
		return nil
	}
	if len(list) != len(x.engines) {
		return gpu.Errorf(op, attn.ErrShape, "%s of %d members of %d", name, len(list), len(x.engines))
	}
	for i := range list {
		name := fmt.Sprintf("%s of member %d", name, i)
		if optional && (list[i].Buffer == nil) != (list[0].Buffer == nil) {
			return gpu.Errorf(op, attn.ErrShape, "%s is left out, or that of member 0 alone is", name)
		}
		check := list[i].CheckFloats
		if optional {
			check = list[i].CheckOptional
		}
		if err := check(op, name, elements(i)); err != nil {
			return err
		}
	}
	return nil
}

// loose is operands of what kernels read and write by elements.
func (x *Exchange) loose(op, name string, list []gpu.Memory, optional bool, elements int) error {
	if optional && list == nil {
		return nil
	}
	if len(list) != len(x.engines) {
		return gpu.Errorf(op, attn.ErrShape, "%s of %d members of %d", name, len(list), len(x.engines))
	}
	for i := range list {
		name := fmt.Sprintf("%s of member %d", name, i)
		if list[i].DType != attn.Float32 {
			return gpu.Errorf(op, attn.ErrDType, "%s is %v; it must be %v", name, list[i].DType, attn.Float32)
		}
		if err := list[i].CheckLoose(op, name, elements); err != nil {
			return err
		}
	}
	return nil
}

// at is one of a list that may be missing.
func at(list []gpu.Memory, i int) gpu.Memory {
	if list == nil {
		return gpu.Memory{}
	}
	return list[i]
}

// AllReduce queues what a member does of it, in place of that member in the order of the group's operations. d is the
// member's. Errors wrap attn.ErrShape and attn.ErrDType, or are the driver's; nothing is queued then.
func (d *Engine) AllReduce(s *cuda.Stream, x *Exchange, o *AllReduce, member int) error {
	const op = "all-reduce"
	if err := x.member(op, d, member); err != nil {
		return err
	}
	if o.Rows < 1 || o.N < 1 || o.N > math.MaxInt32 || o.Rows > math.MaxInt/4/o.N {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.N)
	}
	count := o.Rows * o.N
	all, row := func(int) int { return count }, func(int) int { return o.N }
	for _, err := range []error{
		x.operands(op, "x", o.X, false, all), x.operands(op, "y", o.Y, false, all),
		x.operands(op, "b", o.B, true, row), x.operands(op, "the residual", o.Residual, true, all),
	} {
		if err != nil {
			return err
		}
	}
	bias, residual := at(o.B, member), at(o.Residual, member)
	p := allReduceParams{group: x.group(member), bias: bias.AddressOr0(), residual: residual.AddressOr0(), count: int64(count), n: int32(o.N)}
	for i := range x.engines {
		p.x[i], p.y[i] = o.X[i].Address(), o.Y[i].Address()
	}
	many, fours := 0, attn.Ceil(count, exchangeEach)
	if count > x.few.reduce {
		many, fours = 1, attn.Ceil(fours, len(x.engines))
	}
	return launchExchange(d, s, x, x.kernels[member].allReduce[many], d.exchangeGrid(x, fours), &p, append(append([]gpu.Memory{bias, residual}, o.X...), o.Y...))
}

// AllGather queues what a member does of it, as [Engine.AllReduce] does.
func (d *Engine) AllGather(s *cuda.Stream, x *Exchange, o *AllGather, member int) error {
	if err := x.member("all-gather", d, member); err != nil {
		return err
	}
	return x.AllGathers(s, []*AllGather{o}, member)
}

// AllGathers is [Engine.AllGather] of one to three, of as many rows and all for the first one alone or none, in one launch.
func (x *Exchange) AllGathers(s *cuda.Stream, lists []*AllGather, member int) error {
	const op = "all-gather"
	d, err := x.engine(op, member)
	if err != nil {
		return err
	}
	if len(lists) < 1 || len(lists) > exchangeLists {
		return gpu.Errorf(op, attn.ErrShape, "%d of them; a launch has 1 to %d", len(lists), exchangeLists)
	}
	rows, onlyFirst := lists[0].Rows, lists[0].OnlyFirst
	p := allGatherParams{group: x.group(member), lists: int32(len(lists)), rows: int32(rows)}
	if onlyFirst {
		p.onlyFirst = 1
	}
	var memory []gpu.Memory
	fours, most := 0, 0
	for i, o := range lists {
		if o.Rows < 1 || o.Rows > math.MaxInt32 || len(o.Columns) != len(x.engines) {
			return gpu.Errorf(op, attn.ErrShape, "%d rows of %v columns of %d members", o.Rows, o.Columns, len(x.engines))
		}
		if o.Rows != rows || o.OnlyFirst != onlyFirst {
			return gpu.Errorf(op, attn.ErrShape, "%d rows, and %d; for the first alone: %v, and %v", rows, o.Rows, onlyFirst, o.OnlyFirst)
		}
		list := &p.list[i]
		columns, err := list.fill(op, x, o, member)
		if err != nil {
			return err
		}
		list.fours = int32(min(fours, math.MaxInt32)) // more are not sent
		fours += attn.Ceil(rows*columns, exchangeEach)
		most = max(most, rows*columns)
		memory = append(append(memory, o.X...), o.Y...)
	}
	many, threads := 0, fours*(len(x.engines)-1) // one for each that comes
	if fours > x.few.gather/exchangeEach {
		many, threads = 1, attn.Ceil(most, exchangeEach)
	}
	return launchExchange(d, s, x, x.kernels[member].allGather[many], d.exchangeGrid(x, threads), &p, memory)
}

// fill checks one of the lists, and returns how many columns a member has at most.
func (list *gatherList) fill(op string, x *Exchange, o *AllGather, member int) (most int, err error) {
	total := 0
	for i, n := range o.Columns {
		if n < 1 || n > math.MaxInt32-total {
			return 0, gpu.Errorf(op, attn.ErrShape, "%d rows of %v columns", o.Rows, o.Columns)
		}
		total, most = total+n, max(most, n)
		list.first[i+1] = int32(total)
	}
	if err := x.operands(op, "x", o.X, false, func(i int) int { return o.Rows * o.Columns[i] }); err != nil {
		return 0, err
	}
	switch {
	case !o.OnlyFirst:
		err = x.operands(op, "y", o.Y, false, func(int) int { return o.Rows * total })
	case len(o.Y) < 1:
		err = gpu.Errorf(op, attn.ErrShape, "y of no member")
	default:
		err = o.Y[0].CheckFloats(op, "y of member 0", o.Rows*total)
	}
	if err != nil {
		return 0, err
	}
	for i := range o.Y {
		if i == 0 || !o.OnlyFirst {
			list.y[i] = o.Y[i].Address()
		}
	}
	list.x = o.X[member].Address()
	return most, nil
}

// AllArgMax queues what a member does of it, as [Engine.AllReduce] does.
func (d *Engine) AllArgMax(s *cuda.Stream, x *Exchange, o *AllArgMax, member int) error {
	const op = "all-argmax"
	if err := x.member(op, d, member); err != nil {
		return err
	}
	if o.Rows < 1 || o.Rows > ArgMaxRows || len(o.Columns) != len(x.engines) || len(o.IDs) != len(x.engines) {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %v columns, ids of %d members, of %d members; there are kernels for %d rows", o.Rows, o.Columns, len(o.IDs), len(x.engines), ArgMaxRows)
	}
	total, first := 0, 0
	for i, n := range o.Columns {
		if n < 1 || n > MostVocab-total {
			return gpu.Errorf(op, attn.ErrShape, "%d rows of %v columns; there are kernels for a vocabulary of %d", o.Rows, o.Columns, MostVocab)
		}
		if i == member {
			first = total
		}
		total += n
	}
	if err := x.operands(op, "x", o.X, false, func(i int) int { return o.Rows * o.Columns[i] }); err != nil {
		return err
	}
	for i := range o.IDs {
		if err := o.IDs[i].Check(op, fmt.Sprintf("the ids of member %d", i), o.Rows, 4); err != nil {
			return err
		}
	}
	logits, ids := o.X[member], o.IDs[member]
	p := allArgMaxParams{group: x.group(member), rows: int32(o.Rows), first: int32(first),
		sample: sampleParams{logits: logits.Address(), ids: ids.Address(), stride: int64(o.Columns[member]), vocab: int32(o.Columns[member])}}
	grid := sampleGrid(&d.info, o.Rows, true)
	grid.Overlap, grid.Waits = d.overlap(), true
	return launchExchange(d, s, x, x.kernels[member].allArgMax, grid, &p, []gpu.Memory{logits, {Buffer: ids.Buffer}})
}

// exchangeGrid is thread blocks for so many fours of elements of a member. All members have the same number of
// them, at most one for each multiprocessor: a block waits for the same one of others.
func (d *Engine) exchangeGrid(x *Exchange, fours int) cuda.Grid {
	blocks := min(attn.Ceil(fours, exchangeThreads), x.blocks)
	return cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{exchangeThreads}, Overlap: d.overlap(), Waits: true}
}

// launchExchange queues a kernel of a member's.
func launchExchange[P any](d *Engine, s *cuda.Stream, x *Exchange, f *cuda.Function, grid cuda.Grid, p *P, memory []gpu.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.args.Reset()
	cuda.Struct(&d.args, p)
	d.hold(memory...)
	for _, b := range x.memory {
		d.args.Hold(b)
	}
	return f.Launch(s, grid, &d.args)
}
