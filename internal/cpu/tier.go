package cpu

import (
	"fmt"
	"os"
	"strings"

	"gorgonia.org/leanattention/internal/attn"
)

// A Tier is an instruction set with kernels. Each family of kernels has a table with an entry for each tier, and uses
// the entry of the tier in use. TierGo is first. The tiers of an architecture follow, the best one last.
type Tier uint8

// TierGo is the tier without assembly, for every machine.
const TierGo Tier = 0

// String returns the name of t in TierVariable.
func (t Tier) String() string { return tierNames[t] }

// TierVariable is the environment variable that chooses the kernels: "go", and "avx2", "avx512" or "amx" on amd64,
// "neon" on arm64. If it is unset or empty, the best tier of the machine is used. The program reads the variable at
// its start. An unknown value, or a tier without kernels on this machine or in this build, is an error that wraps
// [attn.ErrTier], which every call that would use a kernel returns.
const TierVariable = "LEANATTENTION_CPU"

// inUse is the tier in use. errInUse is why there is none. Tests change inUse between runs.
var inUse, errInUse = chooseTier(os.Getenv(TierVariable), BestTier())

// chooseTier returns the tier of the given name; best for an empty name.
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
		TierVariable, name, strings.Join(tierNames[:best+1], ", "), attn.ErrTier)
}

// InUse returns the tier in use.
func InUse() Tier { return inUse }

// CheckTier returns the error of a bad TierVariable, which wraps [attn.ErrTier].
func CheckTier() error { return errInUse }

// ForceTier makes the tier of the given value of TierVariable the tier in use, until restore is called, for tests.
// Nothing may run meanwhile.
func ForceTier(name string) (restore func()) {
	was, err := inUse, errInUse
	inUse, errInUse = chooseTier(name, BestTier())
	return func() { inUse, errInUse = was, err }
}
