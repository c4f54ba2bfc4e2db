package layers

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
	exchangeAhead   = 5 // steps of a grid that a kernel may count beyond the end
)

// MostMembers is the largest number of GPUs of an [Exchange].
const MostMembers = 8

// exchangeFew is the number of bytes of floats that an inbox holds.
const exchangeFew = 512 << 10

// fewFloats is the largest number of floats that a member sends as LL protocol words to one other member, by
// operation. More floats are read and written in place. Words take twice the bytes, which go to each of the others,
// and save a wait.
type fewFloats struct{ reduce, gather, merge int }

// fewOfMembers is measured for two and four GPUs (BenchmarkGPUsExchange). Three GPUs have the numbers of four. More
// GPUs have less: words go to each of the others.
func fewOfMembers(members int) fewFloats {
	if members == 2 {
		return fewFloats{exchangeFew / 4, exchangeFew / 4, exchangeFew / 4}
	}
	const ofFour = 3 // number of other members among four
	kib := func(n int) int { return (n << 10) / 4 * ofFour / max(members-1, ofFour) }
	return fewFloats{reduce: kib(160), gather: kib(512), merge: kib(176)}
}

// ExchangeLimit is how long a kernel waits for the other GPUs by default.
const ExchangeLimit = 10 * time.Second

// ErrNoAnswer is returned after a GPU has not come to an exchange in time.
var ErrNoAnswer = errors.New("a GPU of the group did not answer")

// Exchange is the memory through which the GPUs of a group sum, gather, merge and choose tokens. All members write to
// the memory of each. The memory never moves, so recordings may contain its addresses.
//
//   - Each member must be given the same operations in the same order, each on a stream with the work before.
//   - An operation of one member ends when all others have come to the operation, so all run at the same time. So no
//     member may wait, in its stream or on the host, for the end of an operation that another member has not been
//     given yet.
//   - A kernel that has waited for longer than the limit gives up. From then on all operations of the group end at
//     once with undefined results, and [Exchange.Failed] returns which GPU did not answer. Such a group can only be
//     closed.
//   - If the host knows that an operation could not be given to all members, the group continues after
//     [Exchange.Realign].
type Exchange struct {
	engines []*Engine
	kernels []*exchangeKernels
	memory  []*cuda.Buffer
	status  *cuda.Host // a word of each member: the member that did not answer, + 1, and the round
	blocks  int
	limit   time.Duration
	few     fewFloats             // tests have other numbers
	lost    atomic.Pointer[error] // the error of a failed Realign
}

// exchangeKernels are the kernels of one device.
type exchangeKernels struct {
	allReduce, reduceScatter, allGather, mergeStates [2]*cuda.Function // for few elements, and for many
	allArgMax                                        *cuda.Function
	nothing                                          *cuda.Function
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
	n, own         int32
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

// NewExchange allocates the memory for exchanges of the engines' GPUs, 2 to 8, and loads the kernels: later no load
// happens while a GPU waits. Each GPU must reach the memory of all others. limit is how long a kernel may wait; 0 is
// [ExchangeLimit].
//
// Errors: [attn.ErrUnsupported] for another number of GPUs, attn.ErrShape for a GPU that is listed twice or a limit
// below 0, kernels.ErrNoImage, [cuda.ErrNoPeerAccess], and the driver's. After an error nothing is left.
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
			_ = x.Close() // the first error has more detail
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
		"exchange_reduce_scatter_few": &k.reduceScatter[0], "exchange_reduce_scatter_many": &k.reduceScatter[1],
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

// Bytes returns the exchange's memory on each GPU.
func (x *Exchange) Bytes() int64 { return x.memory[0].Len() }

// Failed returns which GPU did not answer, after the operations that waited for the GPU are done. The error wraps
// [ErrNoAnswer]. Failed returns nil if no GPU has failed, and does not wait.
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

// Realign makes the members agree on the next operation after one member could not be given an operation for which
// others may wait. finish waits for the work of all members, which ends within the limit. Results from before the
// operation are valid. After an error the group can only be closed, and [Exchange.Failed] returns the error.
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

// Close waits for the work of all members and frees the memory. Close returns cuda.ErrClosed after an earlier Close.
func (x *Exchange) Close() error {
	var errs []error
	closed := 0
	note := func(err error) {
		if errors.Is(err, cuda.ErrClosed) { // closed with its device
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
// of Rows x N elements of float32, summed in this order: all members get the same bits. Each list has an element of
// each member, in the member's memory. B, of N elements, and Residual may have no buffer, on all members alike, and
// are equal on all members. Y of a member may be its X or its Residual.
//
// With Scatter, Y of member i has the sums of columns i*N/members up to (i+1)*N/members alone. Then N is a multiple of four times the number
// of members, Y is not an X, and there are neither B nor Residual.
type AllReduce struct {
	Rows, N           int
	X, B, Residual, Y []gpu.Memory // one for each member; B and Residual may be nil
	Scatter           bool
}

// AllGather is the operands of Y = the columns of all members side by side, of Rows rows of float32. Member i has
// Columns[i] >= 1 of the columns, in X[i]. With OnlyFirst the first member alone gets Y. Y is not an X.
type AllGather struct {
	Rows      int
	Columns   []int
	X, Y      []gpu.Memory // one for each member; Y of the first alone with OnlyFirst
	OnlyFirst bool
}

// ArgMaxRows is the largest number of rows of an [AllArgMax]: a row takes two words of an inbox.
const ArgMaxRows = exchangeFew / 4 / 2

// AllArgMax is the operands of the most likely token of each of Rows rows of logits, which are the columns of all
// members side by side, by the rules of [Samples] without settings. All members get the same tokens. Member i has
// Columns[i] >= 1 of the columns, in X[i].
type AllArgMax struct {
	Rows    int
	Columns []int
	X       []gpu.Memory // one for each member
	IDs     []gpu.Bytes
}

// engine returns a member's engine.
func (x *Exchange) engine(op string, member int) (*Engine, error) {
	if member < 0 || member >= len(x.engines) {
		return nil, gpu.Errorf(op, attn.ErrShape, "member %d of %d", member, len(x.engines))
	}
	return x.engines[member], nil
}

// member checks that d is the engine of a member.
func (x *Exchange) member(op string, d *Engine, member int) error {
	if e, err := x.engine(op, member); err != nil || e == d {
		return err
	}
	return gpu.Errorf(op, attn.ErrShape, "member %d is GPU %d, and not the engine of GPU %d", member, x.engines[member].info.Ordinal, d.info.Ordinal)
}

// group returns a member's argument of the kernels.
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

// operands checks a list of one operand for each member, with aligned memory. A missing list of an optional operand
// is valid.
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

// loose is operands for memory that kernels read and write by elements.
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

// at returns an element of a list that may be missing.
func at(list []gpu.Memory, i int) gpu.Memory {
	if list == nil {
		return gpu.Memory{}
	}
	return list[i]
}

// AllReduce queues a member's part of the operation, in the order of the group's operations. d is the member's
// engine. Errors wrap attn.ErrShape and attn.ErrDType, or are the driver's; then nothing is queued.
func (d *Engine) AllReduce(s *cuda.Stream, x *Exchange, o *AllReduce, member int) error {
	const op = "all-reduce"
	if err := x.member(op, d, member); err != nil {
		return err
	}
	if o.Rows < 1 || o.N < 1 || o.N > math.MaxInt32 || o.Rows > math.MaxInt/4/o.N {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.N)
	}
	count, members := o.Rows*o.N, len(x.engines)
	all, row, own := func(int) int { return count }, func(int) int { return o.N }, count
	if o.Scatter {
		if o.N%(exchangeEach*members) != 0 || o.B != nil || o.Residual != nil {
			return gpu.Errorf(op, attn.ErrShape, "rows of %d elements, to scatter over %d members: want a multiple of %d, and no bias and residual", o.N, members, exchangeEach*members)
		}
		own /= members
	}
	for _, err := range []error{
		x.operands(op, "x", o.X, false, all), x.operands(op, "y", o.Y, false, func(int) int { return own }),
		x.operands(op, "b", o.B, true, row), x.operands(op, "the residual", o.Residual, true, all),
	} {
		if err != nil {
			return err
		}
	}
	bias, residual := at(o.B, member), at(o.Residual, member)
	p := allReduceParams{group: x.group(member), bias: bias.AddressOr0(), residual: residual.AddressOr0(), count: int64(own), n: int32(o.N)}
	for i := range x.engines {
		p.x[i], p.y[i] = o.X[i].Address(), o.Y[i].Address()
	}
	many, fours, kernels := 0, attn.Ceil(own, exchangeEach), x.kernels[member].allReduce
	if own > x.few.reduce {
		many = 1
	}
	switch {
	case o.Scatter:
		p.own, kernels = int32(o.N/members), x.kernels[member].reduceScatter
	case many == 1:
		fours = attn.Ceil(fours, members)
	}
	return launchExchange(d, s, x, kernels[many], d.exchangeGrid(x, fours), &p, append(append([]gpu.Memory{bias, residual}, o.X...), o.Y...))
}

// AllGather queues a member's part, as [Engine.AllReduce] does.
func (d *Engine) AllGather(s *cuda.Stream, x *Exchange, o *AllGather, member int) error {
	if err := x.member("all-gather", d, member); err != nil {
		return err
	}
	return x.AllGathers(s, []*AllGather{o}, member)
}

// AllGathers is [Engine.AllGather] of one to three operations in one launch. All have equal Rows and OnlyFirst.
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
		list.fours = int32(min(fours, math.MaxInt32)) // no more are sent
		fours += attn.Ceil(rows*columns, exchangeEach)
		most = max(most, rows*columns)
		memory = append(append(memory, o.X...), o.Y...)
	}
	many, threads := 0, fours*(len(x.engines)-1) // one for each incoming four
	if fours > x.few.gather/exchangeEach {
		many, threads = 1, attn.Ceil(most, exchangeEach)
	}
	return launchExchange(d, s, x, x.kernels[member].allGather[many], d.exchangeGrid(x, threads), &p, memory)
}

// fill checks one of the lists, and returns the largest number of columns of a member.
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

// AllArgMax queues a member's part, as [Engine.AllReduce] does.
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

// exchangeGrid returns the thread blocks for a member's elements, in fours. All members have the same number of
// blocks, at most one for each multiprocessor: a block waits for the same block of the others.
func (d *Engine) exchangeGrid(x *Exchange, fours int) cuda.Grid {
	blocks := min(attn.Ceil(fours, exchangeThreads), x.blocks)
	return cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{exchangeThreads}, Overlap: d.overlap(), Waits: true}
}

// launchExchange queues a kernel of a member.
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
