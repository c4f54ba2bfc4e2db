package cpu

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// A Tier is an instruction set that kernels exist for. Each family of kernels has a table of Tiers entries, and
// uses that of the tier in use. TierGo is first. The tiers of an architecture follow, from the least to the best.
type Tier uint8

// TierGo is the tier without assembly, which every machine has.
const TierGo Tier = 0

// String returns the name that TierVariable has for t.

func (t Tier) String() string { return tierNames[t] }

// TierVariable is the environment variable that chooses the kernels: "go", and "avx2", "avx512" or "amx" on amd64,
// "neon" on arm64. Without it, or with an empty value, the best ones for the machine are used. It is read when the program starts.
// A value that is none of these, or one that this machine or build has no kernels for, is an error that
// wraps ErrTier, which every call that would use a kernel returns.
const TierVariable = "LEANATTENTION_CPU"

// ErrTier: TierVariable asks for kernels that there are none of.
var ErrTier = errors.New("no such kernels")

// inUse is the tier in use, or why there is none. Tests change it between runs.
var inUse, errInUse = chooseTier(os.Getenv(TierVariable), BestTier())

// chooseTier returns the tier of the given name, best if there is none.
func chooseTier(name string, best Tier) (Tier, error) {
	if name == "" {
		return best, nil
	}
	for t, n := range tierNames {
		if n == name && Tier(t) <= best {
			return Tier(t), nil
		}
	}
	return best, fmt.Errorf("leanattention: %s=%s: this machine and build have %s: %w",
		TierVariable, name, strings.Join(tierNames[:best+1], ", "), ErrTier)
}

// InUse returns the tier in use.
func InUse() Tier { return inUse }

// CheckTier returns the error of a bad TierVariable, which wraps ErrTier.
func CheckTier() error { return errInUse }

// ForceTier makes the tier in use the one that TierVariable would choose with the given value, until restore is called. It
// is for tests. Nothing may run meanwhile.
func ForceTier(name string) (restore func()) {
	was, err := inUse, errInUse
	inUse, errInUse = chooseTier(name, BestTier())
	return func() { inUse, errInUse = was, err }
}
