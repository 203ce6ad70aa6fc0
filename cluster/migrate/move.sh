# shellcheck shell=sh disable=SC2016,SC2046,SC2086,SC2116,SC2154
# The rest is the same for every cluster (cluster/migrate/move.sh). Each step can be cut and run again.

# Run by a Job as the user that Slinky's slurmctld is. A state is whole with its job_state, which is copied last but one;
# a `clustername` of another cluster keeps slurmctld from starting, and is the last to come and the first to go.
state_over='
cd /claim
if [ -e job_state ] && [ -e slurmctld/job_state ] && ! cmp -s job_state slurmctld/job_state; then
    echo "there are two states, at the top of the claim and in slurmctld/: keep the one whose jobs you want, move the other away" >&2
    exit 1
fi
if [ ! -e slurmctld/job_state ]; then
    if [ ! -e job_state ]; then
        echo "there is no state on the claim: is it the right one?" >&2
        exit 1
    fi
    rm -rf slurmctld.new slurmctld
    mkdir -m 0700 slurmctld.new
    find . -mindepth 1 -maxdepth 1 ! -name "slurm*" ! -name backups ! -name lost+found -exec cp -a -t slurmctld.new {} +
    sync
    mv -T slurmctld.new slurmctld
fi
printf moved-to-minivm > slurm-lock
mv slurm-lock clustername
find . -mindepth 1 -maxdepth 1 ! -name "slurm*" ! -name backups ! -name lost+found ! -name clustername -user "$(id -u)" -exec rm -rf {} +
sync
echo "the state is at slurmctld/"
'
state_back='
cd /claim
left=slurmctld/moved-to-another-claim
if [ ! -e "$left" ]; then
    if [ ! -e slurmctld/job_state ]; then
        echo "there is no state of minivm on the claim; of two controllers scale to one first" >&2
        exit 1
    fi
    if [ -e job_state ] && ! cmp -s job_state slurmctld/job_state; then
        echo "there are two states, at the top of the claim and in slurmctld/: keep the one whose jobs you want, move the other away" >&2
        exit 1
    fi
    cp slurmctld/clustername slurm-clustername
    find slurmctld -mindepth 1 -maxdepth 1 ! -name job_state ! -name clustername -exec cp -a -t . {} +
    cp -a slurmctld/job_state slurm-jobs
    sync
    mv slurm-jobs job_state
    sync
    touch "$left"
fi
if [ -e slurm-clustername ]; then mv slurm-clustername clustername; fi
find slurmctld -mindepth 1 -maxdepth 1 ! -name moved-to-another-claim -exec rm -rf {} +
sync
echo "the state is at the top of the claim"
'

k() { kubectl -n "$namespace" "$@"; }
say() { printf '%s\n' "$*" >&2; }
refuse() { say "cannot move: $*"; exit 1; }
theirs="app.kubernetes.io/name=slurmctld,app.kubernetes.io/instance=$controller"
workers="app.kubernetes.io/name=slurmd,slinky.slurm.net/cluster=$controller"
ours="app.kubernetes.io/name=minivm,app.kubernetes.io/instance=$release,app.kubernetes.io/component=controller"
our_workers="app.kubernetes.io/name=minivm,app.kubernetes.io/instance=$release,app.kubernetes.io/component=worker"

operator() { kubectl -n "$operator_namespace" scale deployment "$operator" --replicas="$1"; }

scale() { # SELECTOR REPLICAS: kubectl scale -l fails where nothing has the label
    for object in $(k get deployment,statefulset -l "$1" -o name); do
        k scale "$object" --replicas="$2"
    done
}

stop() { # SELECTOR STATEFULSET: end a controller, and wait for its pod
    [ -z "$(k get statefulset "$2" --ignore-not-found -o name)" ] || k scale statefulset "$2" --replicas=0
    for _ in $(seq 90); do
        [ -n "$(k get pods -l "$1" -o name)" ] || return 0
        sleep 2
    done
    refuse "$2 does not end; see kubectl -n $namespace describe pods -l $1, then run this again"
}

# Two controllers with one state lose each other's jobs.
claim_is_free() {
    pods=$(k get pods -o jsonpath='{range .items[*]}{.metadata.name}{" "}{.spec.volumes[*].persistentVolumeClaim.claimName}{"\n"}{end}')
    users=$(printf '%s\n' "$pods" | awk -v claim="$claim" '$1 !~ /^move-state/ { for (i = 2; i <= NF; i++) if ($i == claim) print $1 }')
    [ -z "$users" ] || refuse "the claim $claim is used by $(echo $users): a controller runs there; end it first"
}

# Run a script on the claim, as the user that Slinky's slurmctld is and with its image.
on_the_claim() {
    image=$(k get statefulset "$controller-controller" -o jsonpath='{.spec.template.spec.containers[?(@.name=="slurmctld")].image}')
    k delete job move-state --ignore-not-found --wait
    k apply -f - <<END
apiVersion: batch/v1
kind: Job
metadata: {name: move-state}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      imagePullSecrets: $pull_secrets
      securityContext: {runAsNonRoot: true, runAsUser: $uid, runAsGroup: $uid, fsGroup: $uid}
      containers:
        - name: move
          image: $image
          command: [sh, -euc]
          args:
            - |
$(printf '%s\n' "$1" | sed 's/^/              /')
          volumeMounts: [{name: claim, mountPath: /claim}]
      volumes: [{name: claim, persistentVolumeClaim: {claimName: $claim}}]
END
    for _ in $(seq 120); do
        done=$(k get job move-state -o jsonpath='{.status.succeeded}{.status.failed}')
        [ -z "$done" ] || break
        sleep 2
    done
    k logs job/move-state >&2 || :
    [ "$(k get job move-state -o jsonpath='{.status.succeeded}')" = 1 ] || refuse "the Job move-state did not end well; mend it, then run this again"
    k delete job move-state
}

serve() { # SERVICE SELECTOR: which pods are behind the name that workers and logins ask
    k patch service "$1" --type=json -p "[{\"op\": \"replace\", \"path\": \"/spec/selector\", \"value\": $2}]"
}

let_in() { # Slinky's pods reach minivm's while both are there; the chart's policy lets in its own alone
    k apply -f - <<END
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: $release-with-slinky}
spec:
  podSelector: {matchLabels: {app.kubernetes.io/name: minivm, app.kubernetes.io/instance: $release}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchExpressions: [{key: app.kubernetes.io/name, operator: In, values: [slurmctld, slurmd, login]}]}}]
END
}

drain() { # POD REASON NODE...: jobs run on, and none starts
    pod=$1 reason=$2
    shift 2
    [ $# = 0 ] || k exec "$pod" -- scontrol update "nodename=$(echo "$@" | tr ' ' ,)" state=drain "reason=$reason"
}

empty() { # POD SELECTOR JSONPATH: end the workers that run no job, and name the others
    left=
    for worker in $(k get pods -l "$2" -o "jsonpath={range .items[*]}{.metadata.name}/$3 {end}"); do
        node=${worker#*/}
        running=$(k exec "$1" -- squeue --noheader --nodelist="$node" --states=running,completing,configuring,suspended --format=%A) ||
            refuse "squeue in $1 does not answer; run this again"
        if [ -n "$running" ]; then
            left="$left $node ($(echo $running))"
        else
            k delete pod "${worker%/*}"
            k exec "$1" -- scontrol delete "nodename=$node" || :
        fi
    done
    [ -z "$left" ] || { say "these nodes still run jobs:$left; run this again when they have ended"; exit 0; }
}

ready() { k get statefulset "$1-controller" --ignore-not-found -o jsonpath='{.status.readyReplicas}'; }

over() {
    [ $# = 1 ] || refuse "name the directory of minivm's chart: sh $0 over cluster/chart"
    helm template "$release" "$1" -n "$namespace" -f "$here/values.yaml" > /dev/null || refuse "the chart does not take values.yaml"
    secrets
    operator 0
    if [ -n "$(ready "$controller")" ]; then
        drain "$controller-controller-0" "moved to minivm" $(k get pods -l "$workers" -o 'jsonpath={.items[*].spec.hostname}')
    fi
    stop "$theirs" "$controller-controller"
    scale 'app.kubernetes.io/name in (slurmdbd, slurmrestd)' 0
    if [ -z "$(ready "$release")" ]; then
        stop "$ours" "$release-controller"
        claim_is_free
        on_the_claim "$state_over"
    fi
    let_in
    helm upgrade --install "$release" "$1" -n "$namespace" -f "$here/values.yaml"
    serve "$controller-controller" "{\"app.kubernetes.io/name\": \"minivm\", \"app.kubernetes.io/instance\": \"$release\", \"app.kubernetes.io/component\": \"controller\"}"
    k rollout status statefulset "$release-controller" --timeout=300s
    empty "$release-controller-0" "$workers" "{.spec.hostname}"
    say "minivm runs all jobs. When nobody is on Slinky's logins: kubectl -n $namespace scale deployment -l app.kubernetes.io/name=login --replicas=0"
}

back() {
    scale "app.kubernetes.io/instance=$release,app.kubernetes.io/component=fleet" 0
    if [ -n "$(ready "$release")" ]; then
        drain "$release-controller-0" "moved to Slinky" $(k get pods -l "$our_workers" -o 'jsonpath={.items[*].metadata.name}')
    fi
    stop "$ours" "$release-controller"
    if [ -z "$(ready "$controller")" ]; then
        stop "$theirs" "$controller-controller"
        claim_is_free
        on_the_claim "$state_back"
    fi
    let_in
    for service in "$release-slurmctld" "$controller-controller"; do
        serve "$service" "{\"app.kubernetes.io/name\": \"slurmctld\", \"app.kubernetes.io/instance\": \"$controller\"}"
    done
    scale 'app.kubernetes.io/name in (slurmctld, slurmdbd)' 1
    operator 1
    k rollout status statefulset "$controller-controller" --timeout=300s
    # Without their owner the pods that end do not come back.
    k delete statefulset -l "$our_workers" --cascade=orphan
    empty "$controller-controller-0" "$our_workers" "{.metadata.name}"
    say "Slinky runs all jobs. When nobody is on minivm's logins: helm uninstall $release -n $namespace --no-hooks; kubectl -n $namespace delete networkpolicy $release-with-slinky"
}

here=$(dirname "$0")
case ${1-} in
    over | back) "$@" ;;
    *) refuse "say sh $0 over CHART, or sh $0 back" ;;
esac
